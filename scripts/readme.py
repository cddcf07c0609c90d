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

import corrections  # noqa: E402

from benchmarks import table  # noqa: E402
from oa_utils.paper import (  # noqa: E402
    circuits,
    claims,
    components,
    elicitation,
    ground_truth,
    lenses,
    random,
    tracing,
)

README = ROOT / "README.md"
REAL = "smollm2-135m"  # figures of this model are shown where it has them, of the bundled one else
# the paper's main claims in plain words, one or two a chapter; the long table has all of them, with
# their rules
HEADLINES = {
    "single.mean_gap.optimal": (
        "OA has the least mean Δ of all ablations that ignore the prompt: its mean over "
        "components, less that of the next best"
    ),
    "single.median_ratio.mean": (
        "Δ under OA is less than half of that under mean ablation, for the median component: their "
        "ratio"
    ),
    "single.rank.lead": "OA ranks components most as CF does: its lead in rank correlation",
    "circuits_ioi.ablation.counterfactual": (
        "IOI circuits lose less under OA than under CF: ratio of Δ at equal size"
    ),
    "circuits_ioi.ablation.mean": "the same against mean ablation",
    "circuits_gt.ablation.counterfactual": (
        "Greater-Than circuits lose less under OA than under CF: ratio of Δ at equal size"
    ),
    "circuits_ioi.front.counterfactual.hcgs": (
        "UGS finds better circuits than HCGS (IOI, CF): ratio of Δ at equal size"
    ),
    "circuits_ioi.front.counterfactual.acdc": "the same against ACDC",
    "random_ioi.ratio.optimal": (
        "the circuit found is far below random ones of its size (IOI, OA): ratio of Δ"
    ),
    "tracing.peak.attn.last": (
        "a window of attention layers at the last token brings back more with OAT than with GNT: "
        "difference of highest AIE"
    ),
    "tracing.share": (
        "OAT localises better: share of all AIE in the top tenth of layers, less GNT's"
    ),
    "lens.oca_over_tuned": "the OCA lens loses much less than the tuned lens: ratio of losses",
    "faithfulness.steer_basis.direction": (
        "the OCA lens reacts to interventions more as the model does, at every layer: least lead "
        "in direction similarity"
    ),
    "elicitation.lead.true": (
        "after true demonstrations the OCA lens answers better than the tuned lens: difference of "
        "boosts"
    ),
    "elicitation.lead.false": "the same after false demonstrations",
}
GALLERY = {
    "single_scatter": "Every head and MLP: each ablation's Δ against that of CF",
    "single_maps": "Δ of every component, layer by head",
    "02_ioi_fronts": "Circuits for IOI: six searches (EAP-IG in two forms) under four ablations",
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


def every_why() -> dict[str, str]:
    """What each chapter says may be behind its claims that do not hold."""
    chapters = (components, circuits, random, tracing, lenses, elicitation, ground_truth)
    return {prefix: why for chapter in chapters for prefix, why in chapter.WHYS.items()}


PARTS = {
    "headlines": partial(claims.headlines, HEADLINES),
    "claims": partial(claims.markdown, every_why()),
    "gallery": gallery,
    "corrections": corrections.markdown,
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
