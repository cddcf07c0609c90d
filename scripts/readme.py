"""Writes the parts of README.md that are made from published results: `python scripts/readme.py`.

Each part stands between `<!-- name -->` and `<!-- /name -->`; `--check` changes nothing and fails
where a part is not current.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from oa_utils.paper import claims

README = Path(__file__).resolve().parent.parent / "README.md"
PARTS = {"claims": claims.markdown}


def current(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The README with every one of these parts made anew."""
    for name, make in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, n = re.subn(pattern, lambda m, make=make: m[1] + make() + m[2], text, flags=re.DOTALL)
        if n != 1:
            raise ValueError(f"README.md has {n} parts <!-- {name} -->, there must be one")
    return text


def write_parts(parts: Mapping[str, Callable[[], str]], check: bool) -> None:
    """Writes these parts, or only checks that they are current."""
    before = README.read_text("utf-8")
    after = current(before, parts)
    if check and after != before:
        sys.exit("README.md is not current: run `make readme`")
    if after != before:
        README.write_text(after, "utf-8")


if __name__ == "__main__":
    write_parts(PARTS, "--check" in sys.argv[1:])
