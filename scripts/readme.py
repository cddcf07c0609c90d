"""Writes the parts of README.md that are made from published results and from benchmarks:
`python scripts/readme.py`.

Each part stands between `<!-- name -->` and `<!-- /name -->`; `--check` changes nothing and fails
where a part is not current.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for benchmarks, which are no part of the package

from benchmarks import table  # noqa: E402
from oa_utils.paper import claims  # noqa: E402

README = ROOT / "README.md"
PARTS = {"claims": claims.markdown, "bench": table.markdown}


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
