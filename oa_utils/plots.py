"""One look for all figures: the same colour, marker and line for the same thing everywhere, told apart in grey too."""

import io
import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.text import Text

from oa_utils import files

# Eight colours, each a step of 9 or 10 in lightness from the next, so that a grey print keeps them apart.
BLACK, BLUE, PURPLE, GREEN = "#262626", "#07438a", "#942d9e", "#008559"
RED, SKY, AMBER, PINK, GREY, LIME = "#ee5c20", "#06afe7", "#f8ad00", "#fec4e2", "#a3a3a3", "#c4de89"

STYLES = {  # name: (label, colour, marker, line)
    "optimal": ("OA", BLUE, "o", "-"),
    "optimal_shared": ("OA, shared", SKY, "D", "--"),
    "counterfactual": ("CF", RED, "s", "-."),
    "cf_mean": ("CF mean", PINK, "h", ":"),
    "mean": ("mean", AMBER, "v", "--"),
    "resample": ("resample", GREEN, "^", ":"),
    "zero": ("zero", BLACK, "X", (0, (6, 2))),
    "noise": ("noise", PURPLE, "P", (0, (3, 1, 1, 1))),
    "ugs": ("UGS", BLUE, "o", "-"),
    "hcgs": ("HCGS", RED, "s", "-."),
    "acdc": ("ACDC", AMBER, "v", "--"),
    "eap": ("EAP", GREEN, "^", ":"),
    "eap_ig": ("EAP-IG", LIME, "h", (0, (6, 2))),
    "edge_pruning": ("Edge Pruning", PURPLE, "P", (0, (3, 1, 1, 1))),
    "random": ("random", GREY, ".", ":"),
    "manual": ("manual", BLACK, "X", ""),
    "oca": ("OCA lens", BLUE, "o", "-"),
    "tuned": ("tuned lens", RED, "s", "-."),
    "logit": ("logit lens", PURPLE, "P", (0, (3, 1, 1, 1))),
    "tuned_random": ("tuned, random start", BLACK, "h", ":"),
    "linear": ("linear copy of OCA", SKY, "D", "--"),
    "oat": ("OAT", BLUE, "o", "-"),
    "gnt": ("GNT", PURPLE, "P", (0, (3, 1, 1, 1))),
    "model": ("model", "#000000", "", ":"),
}
LABELS, COLOURS, MARKERS, LINES = ({name: style[i] for name, style in STYLES.items()} for i in range(4))
HATCHES = {
    BLUE: "",
    RED: "//",
    AMBER: "..",
    GREEN: "\\\\",
    PURPLE: "xx",
    SKY: "--",
    LIME: "++",
    PINK: "oo",
    BLACK: "||",
}
MODELS = {"smollm2-135m": "SmolLM2-135M-Instruct, weights rounded to 4 bits"}
PIXELS, LEGIBLE = 600, 7  # a figure shown this wide must have letters at least this high


def theme() -> None:
    """Sizes are for figures 5 to 8 inches wide, which stay legible at 600 pixels."""
    settings = {
        "figure.figsize": (7, 4),
        "figure.constrained_layout.use": True,
        "legend.frameon": False,
        "lines.markersize": 5,
        "grid.color": "#e6e6e6",
        "hatch.linewidth": 0.6,
    }
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", font_scale=1.15, rc=settings)


def style(name: str) -> dict[str, Any]:
    """Keyword arguments for `ax.plot` and `ax.errorbar`."""
    looks = {"label": LABELS[name], "color": COLOURS[name], "marker": MARKERS[name], "linestyle": LINES[name]}
    return {**looks, "markeredgecolor": "#333333", "markeredgewidth": 0.4}


def caption(model: Any, budget: str, n: int | None = None, seed: int | None = None, note: str = "") -> str:
    """What a reader must know to judge a figure."""
    name = getattr(model, "name", model)
    size, start = "" if n is None else f"n = {n:,}", "" if seed is None else f"seed {seed}"
    parts = (MODELS.get(name, name), f"{budget} budget", size, start, note)
    return " · ".join(part for part in parts if part)


def folder() -> Path:
    """Where figures go: `OA_FIGURES`, else `figures` in the repository, or a temporary folder for the test budget."""
    usual = Path(files.scratch().name) if files.budget() == "test" else files.REPO
    return Path(os.environ.get("OA_FIGURES") or usual / "figures")


def save(fig: Figure, name: str, model: Any, caption: str = "") -> Path:
    """Writes `<model>/<name>.png` with its caption below: the same bytes for the same figure, legible when small."""
    inches = fig.get_figwidth()
    for old in fig.findobj(lambda artist: artist.get_gid() == "caption"):
        old.remove()
    if caption:
        size, lines = 8 * max(1, inches / 7), textwrap.fill(caption, 110)
        fig.text(0.5, -0.02, lines, ha="center", va="top", fontsize=size, color="#444444", gid="caption")
    buffer, about = io.BytesIO(), {"Software": None, "Description": caption or None}
    fig.savefig(buffer, format="png", dpi=2 * PIXELS / inches, bbox_inches="tight", metadata=about)
    sizes = [text.get_fontsize() for text in fig.findobj(Text) if text.get_text() and text.get_visible()]
    if (pixels := min(sizes, default=99) / 72 * PIXELS / inches) < LEGIBLE:
        warnings.warn(f"{name}: letters {pixels:.1f} pixels high at {PIXELS} pixels width: narrow it", stacklevel=2)
    path = folder() / files.slug(getattr(model, "name", model)) / f"{files.slug(name)}.png"
    files.write_bytes(path, buffer.getvalue())
    return path


def bar_styles(names: Sequence[Any]) -> dict[str, list[str]]:
    """Colour and hatch of each bar; names without a style of their own get the theme's colours in turn."""
    spare = sns.color_palette("colorblind").as_hex()
    colours = [COLOURS.get(name, spare[i % len(spare)]) for i, name in enumerate(names)]
    return {"color": colours, "hatch": [HATCHES.get(colour, "") for colour in colours]}


def bars(
    ax: Axes, frame: pd.DataFrame, x: str, y: str, err: str | None = None, hue: str | None = None, log: bool = False
) -> None:
    """Grouped bars with the errors that the frame brings, groups and hues in its order."""
    groups = list(frame[x].unique())
    hues = list(frame[hue].unique()) if hue else [None]
    width = 0.8 / len(hues)
    for i, name in enumerate(hues):
        part = (frame[frame[hue] == name] if hue else frame).set_index(x).reindex(groups)
        looks = {k: v[i] for k, v in bar_styles(hues).items()} if hue else bar_styles(groups)
        at = np.arange(len(groups)) + (i - (len(hues) - 1) / 2) * width
        label = LABELS.get(name, str(name)) if hue else None
        ax.bar(at, part[y], 0.95 * width, label=label, edgecolor="white", linewidth=0, **looks)
        if err:
            ax.errorbar(at, part[y], part[err], fmt="none", ecolor="#444444", elinewidth=1, capsize=2)
    ax.set_xticks(range(len(groups)), [LABELS.get(group, str(group)) for group in groups])
    ax.grid(False, axis="x")
    ax.set(xlabel=x, ylabel=y, **({"yscale": "log"} if log else {}))
    if hue:
        ax.legend(title="")


def heatmap(
    ax: Axes,
    matrix: Float[np.ndarray, "rows columns"] | pd.DataFrame,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    log: bool = False,
    fmt: str = "",
) -> None:
    """Darker is less, in colour and in grey alike; `fmt` (such as `.2f`) writes the numbers into the cells."""
    frame = pd.DataFrame(matrix)
    frame = frame.where(frame > 0) if log else frame
    sns.heatmap(frame, ax=ax, cmap="viridis", norm=LogNorm() if log else None, annot=bool(fmt), fmt=fmt or ".2g")
    ax.tick_params(axis="y", rotation=0)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
