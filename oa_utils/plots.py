"""One look for all figures.

The same thing has the same colour, marker and line everywhere, and can be told apart in grey too.
"""

import io
import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from oa_utils import stats, store
from oa_utils.circuits import COLOURS as SLOT_COLOURS
from oa_utils.circuits import Circuit
from oa_utils.graph import SLOTS, Graph

# Eight colours, each a step of 9 or 10 in lightness from the next, so that a grey print keeps them
# apart; grey and lime lie between.
BLACK = "#262626"
BLUE = "#07438a"
PURPLE = "#942d9e"
GREEN = "#008559"
RED = "#ee5c20"
SKY = "#06afe7"
AMBER = "#f8ad00"
PINK = "#fec4e2"
GREY = "#a3a3a3"
LIME = "#c4de89"

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
    "eap_ig": ("EAP-IG, inputs", SKY, "D", (0, (6, 2))),
    "eap_ig_masks": ("EAP-IG, masks, KL", BLACK, "h", (0, (1, 1))),
    "edge_pruning": ("Edge Pruning", PURPLE, "P", (0, (3, 1, 1, 1))),
    "random": ("random", GREY, ".", ":"),
    "manual": ("manual", "#000000", "X", ""),
    "oca": ("OCA lens", BLUE, "o", "-"),
    "tuned": ("tuned lens", RED, "s", "-."),
    "logit": ("logit lens", PURPLE, "P", (0, (3, 1, 1, 1))),
    "tuned_random": ("tuned, random start", BLACK, "h", ":"),
    "tuned_identity": ("tuned, identity start", PINK, "v", (0, (6, 2))),
    "tuned_last": ("tuned, last token only", GREY, "^", (0, (6, 2))),
    "oca_last": ("OCA, last token only", LIME, "h", ":"),
    "oca_several": ("OCA, several positions", LIME, "h", ":"),
    "linear": ("linear copy of OCA", SKY, "D", "--"),
    "oat": ("OAT", BLUE, "o", "-"),
    "gnt": ("GNT", PURPLE, "P", (0, (3, 1, 1, 1))),
    "model": ("model", "#000000", "", ":"),
}
LABELS = {name: label for name, (label, _, _, _) in STYLES.items()}
COLOURS = {name: colour for name, (_, colour, _, _) in STYLES.items()}
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
PIXELS = 600  # a figure shown this wide
LEGIBLE = 7  # must have letters at least so many pixels high


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
    sns.set_theme(
        context="paper", style="whitegrid", palette="colorblind", font_scale=1.15, rc=settings
    )


def style(name: str) -> dict[str, Any]:
    """Keyword arguments for `ax.plot` and `ax.errorbar`; a name of your own is drawn in grey."""
    label, colour, marker, line = STYLES.get(name, (name, GREY, "*", "-"))
    return {
        "label": label,
        "color": colour,
        "marker": marker,
        "linestyle": line,
        "markeredgecolor": "#333333",
        "markeredgewidth": 0.4,
    }


# ---- files


def caption(
    model: Any, budget: str, n: int | None = None, seed: int | None = None, note: str = ""
) -> str:
    """What a reader must know to judge a figure."""
    parts = [
        MODELS.get(model.name, model.name),
        f"{budget} budget",
        "" if n is None else f"n = {n:,}",
        "" if seed is None else f"seed {seed}",
        note,
    ]
    return " · ".join(part for part in parts if part)


def folder(budget: str) -> Path:
    """Where figures go: `OA_FIGURES`, else `figures` of the repository, or of the current folder
    where there is no repository; those of the test budget into `test` below `OA_FIGURES`, else into
    a temporary folder."""
    if given := os.environ.get("OA_FIGURES"):
        return Path(given) / "test" if budget == "test" else Path(given)
    if budget == "test":
        return Path(store.scratch().name) / "figures"
    return (store.repository() or Path.cwd()) / "figures"


def save(fig: Figure, name: str, model: Any, caption: str = "", variant: str = "") -> Path:
    """Writes `<model>/<name>.png` with its caption below: the same bytes for the same figure. A
    `variant` of the run (another task, seed or budget) has a folder of its own."""
    inches = fig.get_figwidth()
    for old in fig.findobj(lambda artist: artist.get_gid() == "caption"):
        old.remove()
    if caption:
        fig.text(
            0.5,
            -0.02,
            textwrap.fill(caption, 110),
            ha="center",
            va="top",
            fontsize=8 * max(1, inches / 7),
            color="#444444",
            gid="caption",
        )
    buffer = io.BytesIO()
    metadata = {"Software": None, "Description": caption or None}
    dpi = 2 * PIXELS / inches
    fig.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", metadata=metadata)
    texts = [text for text in fig.findobj(Text) if text.get_text() and text.get_visible()]
    smallest = min((text.get_fontsize() for text in texts), default=99)
    pixels = smallest / 72 * PIXELS / inches
    if pixels < LEGIBLE:
        warnings.warn(
            f"{name}: letters {pixels:.1f} pixels high at {PIXELS} pixels width: narrow it",
            stacklevel=2,
        )
    place = folder(model.budget) / store.slug(model.name)
    if variant:
        place = place / "own" / store.slug(variant)
    path = place / f"{store.slug(name)}.png"
    store.write_bytes(path, buffer.getvalue())
    return path


# ---- bars and maps


def bar_styles(names: Sequence[Any]) -> dict[str, list[str]]:
    """Colour and hatch of each bar; a name without a style gets one of the theme's colours."""
    spare = sns.color_palette("colorblind").as_hex()
    colours = [COLOURS.get(name, spare[i % len(spare)]) for i, name in enumerate(names)]
    return {"color": colours, "hatch": [HATCHES.get(colour, "") for colour in colours]}


def bars(
    ax: Axes,
    frame: pd.DataFrame,
    x: str,
    y: str,
    err: str | None = None,
    hue: str | None = None,
    log: bool = False,
) -> None:
    """Grouped bars with the errors that the frame brings, groups and hues in its order."""
    groups = list(frame[x].unique())
    hues = list(frame[hue].unique()) if hue else [None]
    width = 0.8 / len(hues)
    for i, name in enumerate(hues):
        part = frame[frame[hue] == name] if hue else frame
        part = part.set_index(x).reindex(groups)
        looks = bar_styles(hues if hue else groups)
        if hue:
            looks = {key: values[i] for key, values in looks.items()}
        at = np.arange(len(groups)) + (i - (len(hues) - 1) / 2) * width
        label = LABELS.get(name, str(name)) if hue else None
        ax.bar(at, part[y], 0.95 * width, label=label, edgecolor="white", linewidth=0, **looks)
        if err:
            errors = {"ecolor": "#444444", "elinewidth": 1, "capsize": 2}
            ax.errorbar(at, part[y], part[err], fmt="none", **errors)
    ax.set_xticks(range(len(groups)), [LABELS.get(group, str(group)) for group in groups])
    ax.grid(False, axis="x")
    ax.set(xlabel=x, ylabel=y)
    if log:
        ax.set_yscale("log")
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
    """Darker is less, in colour and in grey alike; `fmt` (such as `.2f`) writes the numbers in."""
    frame = pd.DataFrame(matrix)
    norm = None
    if log:
        frame = frame.where(frame > 0)
        norm = LogNorm()
    sns.heatmap(frame, ax=ax, cmap="viridis", norm=norm, annot=bool(fmt), fmt=fmt or ".2g")
    ax.tick_params(axis="y", rotation=0)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)


# ---- circuits


def front(ax: Axes, table: pd.DataFrame, by: str = "method", label: bool = True) -> None:
    """Every circuit as a point with two standard errors, and the front of each method (or ablation)
    as a line; the empty circuit has no place on this axis, and no bar goes below a third."""
    table = table[table.n_edges > 0]
    for name, part in table.groupby(by, sort=False):
        looks = style(name)
        best = part.iloc[stats.pareto(part.n_edges, part.gap)]
        ax.plot(best.n_edges, best.gap, color=looks["color"], ls=looks["linestyle"], lw=1.4)
        looks["linestyle"] = ""
        if not label:
            looks["label"] = None
        bars = [np.minimum(2 * part.se, 2 / 3 * part.gap.clip(lower=0)), 2 * part.se]
        ax.errorbar(part.n_edges, part.gap, bars, elinewidth=0.8, capsize=2, **looks)
    ax.set(xscale="log", yscale="log", xlabel="edges", ylabel="Δ (nats)")
    if table.empty:
        return
    span = table.n_edges.max() / table.n_edges.min()
    subs = (1,) if span > 30 else (1, 3) if span > 8 else (1, 2, 5)
    plain_ticks(ax, subs)
    ax.yaxis.set_minor_formatter(NullFormatter())


def plain_ticks(ax: Axes, subs: Sequence[float] = (1, 2, 5), which: str = "x") -> None:
    """A logarithmic axis, x or y, with plain numbers, at so many ticks a decade."""
    axis = {"x": ax.xaxis, "y": ax.yaxis}[which]
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def shared_legend(fig: Figure) -> None:
    """One legend for all panels, each name once, at the right."""
    handles = {}
    for ax in fig.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[name] = handle
    fig.legend(handles.values(), handles, loc="outside right upper", fontsize=8)


def draw(circuit: Circuit, ax: Axes | None = None, max_edges: int = 500) -> Axes:
    """Layer by head, MLPs in a column at the right; all edges go up, and q, k, v enter a head from
    left to right.

    A circuit of more than `max_edges` is drawn by blocks: how many of its edges lead from each
    layer's heads or MLP to each other's.
    """
    n_layers = circuit.graph.n_layers
    n_heads = circuit.graph.attention_writers
    if circuit.n_edges > max_edges:
        return _draw_blocks(circuit, ax)
    if ax is None:
        size = (0.5 * n_heads + 2, 0.5 * n_layers + 1.5)
        _, ax = plt.subplots(figsize=size, layout="constrained")
    places = _places(circuit.graph)
    edges = circuit.edges
    n = max(len(edges), 1)
    width = np.clip(5 * n**-0.36, 0.5, 1.8)
    alpha = np.clip(2.6 * n**-0.29, 0.3, 0.9)
    for slot in ("", *SLOTS):
        colour = SLOT_COLOURS[slot]
        curves = [_curve(places[e.src], places[e.dst], slot) for e in edges if e.slot == slot]
        ax.add_collection(LineCollection(curves, colors=colour, lw=width, alpha=alpha, zorder=1))
        ax.plot([], [], color=colour, label=slot or "into MLP or out")
    dots = np.array([place for vertex, place in places.items() if vertex[0] in "am"])
    ax.scatter(*dots.T, s=4, color="0.85", zorder=0)
    box = {"boxstyle": "round,pad=0.18", "fc": "white", "ec": "0.3", "lw": 0.6}
    for vertex in circuit.vertices:
        x, y = places[vertex]
        ax.text(x, y, vertex, ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    ax.set(xlim=(-0.8, n_heads + 1.4), ylim=(-1.6, n_layers + 1), xlabel="head", ylabel="layer")
    ax.set_yticks(range(n_layers))
    ax.set_xticks([*range(n_heads), n_heads + 0.4], [*map(str, range(n_heads)), "MLP"])
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=7, frameon=False)
    ax.grid(False)
    return ax


def _draw_blocks(circuit: Circuit, ax: Axes | None) -> Axes:
    """How many edges lead from each block (a layer's heads, or its MLP) to each other one."""
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    blocks = list(dict.fromkeys(vertex.split(".")[0] for vertex in circuit.graph.vertices))
    counts = pd.DataFrame(0, index=blocks[:0:-1], columns=blocks[:-1])
    for edge in circuit.edges:
        counts.loc[edge.dst.split(".")[0], edge.src.split(".")[0]] += 1
    heatmap(ax, counts, "from", "to", "edges", log=True)
    every = 1 + len(blocks) // 26
    ticks = np.arange(0, len(counts), every)
    ax.set_xticks(ticks + 0.5, counts.columns[ticks], rotation=90, fontsize=7)
    ax.set_yticks(ticks + 0.5, counts.index[ticks], rotation=0, fontsize=7)
    return ax


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Where each vertex stands."""
    n_heads = graph.attention_writers
    middle = (n_heads - 1) / 2
    places = {"embed": (middle, -1.2), "out": (middle, graph.n_layers + 0.5)}
    for layer in range(graph.n_layers):
        heads = enumerate(graph.attention_vertices(layer))
        places |= {vertex: (head, layer) for head, vertex in heads}
    places |= {f"m{layer}": (n_heads + 0.4, layer + 0.45) for layer in range(graph.n_layers)}
    return places


def _curve(
    start: tuple[float, float], end: tuple[float, float], slot: str, points: int = 40
) -> Float[np.ndarray, "points 2"]:
    """A line that leaves upward and arrives from below; in one column it bows out to pass the
    vertices between."""
    x0, y0 = start
    x3, y3 = end
    bow = min(0.25 + 0.12 * (y3 - y0), 1.1) if x0 == x3 and y3 - y0 > 1 else 0.0
    port = {"q": -0.22, "v": 0.22}.get(slot, 0.0)
    x0 += port / 2
    x3 += port
    y0 += 0.15
    y3 -= 0.15
    reach = 0.4 * (y3 - y0)
    control = np.array([(x0, y0), (x0 + bow, y0 + reach), (x3 + bow, y3 - reach), (x3, y3)])
    t = np.linspace(0, 1, points)[:, None]
    bezier = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    return bezier @ control
