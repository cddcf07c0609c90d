"""Writes the parts of README.md that are made from published results: `python scripts/readme.py`.

Each part stands between `<!-- name -->` and `<!-- /name -->`; `--check` changes nothing and fails
where a part is not current.
"""

import re
import sys
from pathlib import Path

from oa_utils.paper import claims

README = Path(__file__).resolve().parent.parent / "README.md"
PARTS = {"claims": claims.markdown}


def current(text: str) -> str:
    """The README with every part made anew."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, n = re.subn(pattern, lambda m, make=make: m[1] + make() + m[2], text, flags=re.DOTALL)
        if n != 1:
            raise ValueError(f"README.md has {n} parts <!-- {name} -->, there must be one")
    return text


def main() -> None:
    before = README.read_text("utf-8")
    after = current(before)
    if "--check" in sys.argv[1:]:
        if after != before:
            sys.exit("README.md is not current: run `make readme`")
    elif after != before:
        README.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
