from itertools import combinations
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from oa_utils import plots, store
from oa_utils.circuits import Circuit
from oa_utils.graph import Graph

TINY = SimpleNamespace(name="org/tiny", budget="default")
TOGETHER = {
    "ablations": "zero mean resample cf_mean counterfactual optimal optimal_shared noise",
    "methods": "ugs hcgs acdc eap eap_ig eap_ig_masks edge_pruning manual",
    "random circuits": "random counterfactual optimal mean resample",
    "lenses": "oca tuned tuned_random linear logit mean resample model",
    "starts of lenses": "oca tuned tuned_identity tuned_random",
    "positions of lenses": "oca tuned tuned_last oca_several",
    "positions of lenses, paper": "oca tuned tuned_last oca_last",
    "tracing": "gnt oat model",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.delenv("OA_BUDGET", raising=False)
    monkeypatch.setenv("OA_FIGURES", str(tmp_path))
    with matplotlib.rc_context():
        plots.theme()
        yield tmp_path
    plt.close("all")


def lightness(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = np.dot([0.2126, 0.7152, 0.0722], linear)
    return 116 * np.cbrt(luminance) - 16 if luminance > 0.008856 else 903.3 * luminance


@pytest.mark.parametrize("group", TOGETHER)
def test_what_is_drawn_together_differs_in_grey_and_in_marker(group):
    names = TOGETHER[group].split()
    for a, b in combinations(names, 2):
        assert abs(lightness(plots.COLOURS[a]) - lightness(plots.COLOURS[b])) > 7, (a, b)
        assert plots.STYLES[a][2] != plots.STYLES[b][2], (a, b)
    assert max(lightness(plots.COLOURS[name]) for name in names) < 87


def test_every_name_has_every_kind_of_style():
    names = {name for group in TOGETHER.values() for name in group.split()}
    assert names == set(plots.STYLES)
    assert (plots.LABELS["counterfactual"], plots.LABELS["optimal"]) == ("CF", "OA")
    fig, ax = plt.subplots()
    for name in names:
        ax.plot([1, 2], [1, 2], **plots.style(name))
        ax.errorbar([1, 2], [1, 2], [0.1, 0.1], **plots.style(name))


def test_a_name_of_your_own_is_drawn_in_grey():
    assert plots.style("my_ablation")["label"] == "my_ablation"
    assert plots.style("my_ablation")["color"] == plots.GREY


def test_caption_says_what_is_known_and_nothing_else():
    model = SimpleNamespace(name="smollm2-135m")
    text = plots.caption(model, "default", n=1000, seed=0, note="bars: one standard error")
    assert "4 bits" in text
    assert text.endswith("default budget · n = 1,000 · seed 0 · bars: one standard error")
    assert plots.caption(SimpleNamespace(name="tiny"), "paper") == "tiny · paper budget"


def figure():
    fig, ax = plt.subplots()
    ax.plot([0, 1], [0, 1], **plots.style("ugs"))
    ax.set(xlabel="edges", ylabel="Δ (nats)")
    return fig


def test_save_writes_the_same_bytes_with_the_caption_once(place):
    fig = figure()
    path = plots.save(fig, "front", TINY, "tiny · Δ")
    assert path == place / "org-tiny" / "front.png"
    first = path.read_bytes()
    assert plots.save(fig, "front", TINY, "tiny · Δ").read_bytes() == first
    assert plots.save(figure(), "again", TINY, "tiny · Δ").read_bytes() == first
    assert [text.get_text() for text in fig.texts] == ["tiny · Δ"]
    image = Image.open(path)
    assert image.info["Description"] == "tiny · Δ"
    assert not {"Software", "Date", "Creation Time"} & image.info.keys()
    assert 1100 < image.width < 1300


def test_the_caption_is_drawn_below_the_figure(place):
    plain = Image.open(plots.save(figure(), "plain", TINY))
    captioned = Image.open(plots.save(figure(), "captioned", TINY, "a word " * 60))
    assert captioned.height > plain.height + 60
    assert captioned.width < 1.1 * plain.width
    below = np.asarray(captioned.convert("L"))[plain.height + 10 :]
    assert (below < 128).any()


def test_a_figure_that_would_be_illegible_is_reported():
    with pytest.warns(UserWarning, match="wide: letters .* pixels"):
        fig, ax = plt.subplots(figsize=(16, 3))
        plots.save(fig, "wide", TINY)


def test_figures_are_in_the_repository_or_here_and_those_of_a_test_in_a_temporary_folder(
    place, monkeypatch
):
    assert plots.folder("default") == place
    assert plots.folder("test") == place / "test"
    monkeypatch.delenv("OA_FIGURES")
    root = store.repository()
    assert plots.folder("default") == plots.folder("paper") == root / "figures"
    assert root not in plots.folder("test").parents
    tested = SimpleNamespace(name="tiny", budget="test")
    assert plots.save(figure(), "x", tested).parent == plots.folder("test") / "tiny"
    monkeypatch.setattr(store, "repository", lambda: None)
    monkeypatch.chdir(place)
    assert plots.folder("default") == place / "figures"


def test_bars_stand_in_the_frames_order_with_its_errors():
    frame = pd.DataFrame(
        [("m1", "zero", 3.0, 0.3), ("m1", "optimal", 1.0, 0.1), ("a0", "zero", 4.0, 0.4)],
        columns=["x", "how", "gap", "se"],
    )
    fig, ax = plt.subplots()
    plots.bars(ax, frame, "x", "gap", "se", "how")
    zero, optimal = [c for c in ax.containers if isinstance(c, matplotlib.container.BarContainer)]
    assert [bar.get_height() for bar in zero] == [3.0, 4.0] and optimal[0].get_height() == 1.0
    assert np.isnan(optimal[1].get_height())
    assert zero[0].get_x() + zero[0].get_width() <= optimal[0].get_x() + 1e-9
    assert to_rgb(optimal[0].get_facecolor()[:3]) == to_rgb(plots.COLOURS["optimal"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["m1", "a0"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["zero", "OA"]
    stems = [c for c in ax.collections if len(c.get_segments())][0].get_segments()
    assert stems[0][:, 1].tolist() == pytest.approx([2.7, 3.3])


def test_bars_without_hue_take_the_colour_of_their_name():
    fig, ax = plt.subplots()
    plots.bars(
        ax, pd.DataFrame({"how": ["mean", "other"], "gap": [1.0, 2.0]}), "how", "gap", log=True
    )
    assert to_rgb(ax.patches[0].get_facecolor()[:3]) == to_rgb(plots.COLOURS["mean"])
    assert ax.get_legend() is None and ax.get_yscale() == "log"


def test_heatmap_shows_every_cell_and_logarithms_leave_zeros_out():
    fig, (left, right) = plt.subplots(1, 2)
    plots.heatmap(left, np.array([[1.0, 0.0], [10.0, 1000.0]]), "head", "layer", "Δ", log=True)
    mesh = left.collections[0]
    assert mesh.get_array().mask.ravel().tolist() == [False, True, False, False]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1.0, 1000.0)
    assert (left.get_xlabel(), left.get_ylabel(), left.get_title()) == ("head", "layer", "Δ")
    plots.heatmap(right, pd.DataFrame([[0.5]], index=["a"], columns=["b"]), fmt=".2f")
    assert [text.get_text() for text in right.texts] == ["0.50"]
    fig.canvas.draw()


# ---- circuits

FRONT = pd.DataFrame(
    [
        ("ugs", "optimal", 10, 1.0, 0.1),
        ("ugs", "optimal", 20, 2.0, 0.1),
        ("ugs", "optimal", 30, 0.5, 0.1),
        ("acdc", "mean", 20, 3.0, 0.2),
    ],
    columns=["method", "ablation", "n_edges", "gap", "se"],
)


def test_a_front_shows_every_circuit_and_a_line_through_the_best():
    fig, ax = plt.subplots()
    plots.front(ax, FRONT)
    bars = ax.containers
    assert [bar.get_label() for bar in bars] == ["UGS", "ACDC"]
    assert bars[0].lines[0].get_xdata().tolist() == [10, 20, 30]
    assert bars[0].lines[0].get_linestyle() == "None"
    line = ax.lines[0]
    assert line.get_xdata().tolist() == [10, 30]
    assert to_rgb(line.get_color()) == to_rgb(plots.COLOURS["ugs"])
    segment = bars[0].lines[2][0].get_segments()[0]
    assert segment[:, 1].tolist() == pytest.approx([0.8, 1.2])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_fronts_by_ablation_share_one_legend_with_each_name_once():
    fig, (left, right) = plt.subplots(1, 2)
    plots.front(left, FRONT, by="ablation")
    plots.front(right, FRONT.assign(method="x"), by="ablation")
    plots.shared_legend(fig)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["OA", "mean"]
    bare_fig, bare = plt.subplots()
    plots.front(bare, FRONT, label=False)
    assert bare.get_legend_handles_labels()[1] == []
    fig.canvas.draw()


def circuit(n_layers=2, n_heads=2):
    graph = Graph(n_layers, n_heads)
    return Circuit(graph, torch.ones(len(graph)), "manual")


def test_a_circuit_is_drawn_with_every_vertex_and_edge():
    whole = circuit()
    ax = plots.draw(whole)
    curves = [curve for lines in ax.collections[:4] for curve in lines.get_segments()]
    assert len(curves) == whole.n_edges
    assert all(np.all(np.diff(curve[:, 1]) > 0) for curve in curves)
    assert sorted(text.get_text() for text in ax.texts) == sorted(whole.vertices)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["into MLP or out", "q", "k", "v"]
    assert not ax.get_title(loc="left")
    ax.figure.canvas.draw()


def test_a_large_circuit_is_drawn_by_blocks_with_every_edge_counted():
    whole = circuit()
    fig, ax = plt.subplots()
    assert plots.draw(whole, ax, max_edges=10) is ax
    counts = ax.collections[0].get_array().filled(0)
    assert counts.sum() == whole.n_edges
    into_out_from_embed = counts.reshape(len(ax.get_yticks()), -1)[0, 0]
    assert into_out_from_embed == sum(
        edge.src == "embed" and edge.dst == "out" for edge in whole.edges
    )
