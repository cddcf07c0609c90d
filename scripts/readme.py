"""Writes the parts of README.md that are made from published results and from benchmarks:
`python scripts/readme.py`.

Each part stands between `<!-- name -->` and `<!-- /name -->`; `--check` changes nothing and fails
where a part is not current.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for benchmarks, which are no part of the package

from benchmarks import table  # noqa: E402
from oa_utils.paper import claims  # noqa: E402

README = ROOT / "README.md"
REAL = "smollm2-135m"  # figures of this model are shown where it has them, of the bundled one else
# the paper's main claims, one or two a chapter; all others are in the long table
HEADLINES = (
    "single.rank.lead",
    "single.median_ratio.mean",
    "single.mean_gap.optimal",
    "circuits_ioi.front.counterfactual.hcgs",
    "circuits_ioi.front.counterfactual.acdc",
    "circuits_ioi.ablation.counterfactual",
    "circuits_ioi.ablation.mean",
    "circuits_ioi.manual.optimal",
    "circuits_gt.ablation.counterfactual",
    "random_ioi.ratio.optimal",
    "tracing.share",
    "tracing.single.lead",
    "lens.oca_over_tuned",
    "lens.training_cost",
    "faithfulness.steer_basis.magnitude",
    "elicitation.lead.false",
)
GALLERY = {
    "single_scatter": "Every head and MLP: each ablation's Δ against that of CF",
    "single_maps": "Δ of every component, layer by head",
    "02_ioi_fronts": "Circuits for IOI: six searches under four ablations",
    "03_gt_fronts": "The same for Greater-Than",
    "04_random": "Found circuits against random ones of their size",
    "tracing": "Where facts are recalled: noise (GNT) against optimal ablation (OAT)",
    "lens_loss": "What layers know of the model's last word, lens by lens",
    "08_boosts": "Lenses that answer better than the model they read",
}


def gallery() -> str:
    """Eight figures, two in a row."""
    cells = []
    for name, caption in GALLERY.items():
        places = [Path("figures") / model / f"{name}.png" for model in (REAL, "tiny")]
        path = next(place for place in places if (ROOT / place).is_file())
        cells.append(f"![{caption}]({path})<br>*{caption} ({path.parent.name})*")
    rows = [f"| {left} | {right} |" for left, right in zip(cells[::2], cells[1::2], strict=True)]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


PARTS = {
    "headlines": partial(claims.markdown, HEADLINES),
    "claims": claims.markdown,
    "gallery": gallery,
    "bench": table.markdown,
}


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
