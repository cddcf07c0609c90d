"""The lens experiments as a whole: what is trained on which text, the tables of paper §5 and their claims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

from oa_utils import faithfulness as ff
from oa_utils import lenses, runs, stats
from oa_utils.claims import Claim
from oa_utils.lenses import Lens, LensSettings, Streams
from oa_utils.models import DATA, Model, load_model
from oa_utils.texts import contexts

VERSION = 1
KINDS = ("logit", "tuned", "tuned_random", "mean", "resample", "oca", "linear")
PARTS = ("train", "validation", "test")
PERTURBATIONS = {  # ours: (the anchors' name, in words)
    "steer_random": ("steer_rand", "random perturbations"),
    "steer_basis": ("steer_sing", "basis-aligned perturbations"),
    "project_random": ("proj_rand", "random projections"),
    "project_basis": ("proj_sing", "basis-aligned projections"),
    "resample_basis": ("resample_100", "basis-aligned resample ablation"),
}


@dataclass(frozen=True)
class Study:
    train: int = 4000  # contexts
    validation: int = 512
    test: int = 1024
    length: int = 25  # tokens of a context, BOS counted
    others: tuple[int, ...] = (5, 10, 50)  # lengths that the trained lenses are also tested on
    steps: int = 600
    batch: int = 64
    random_lr: float = 0.01  # for the tuned lens from the reference's random start: its own learning rate
    seed: int = 0


def sizes(model: Model, budget: str, seed: int = 0) -> Study:
    """The study of both lens notebooks, so that the second finds the lenses of the first in the store."""
    if budget == "test":
        return Study(model.d_model + 172, 64, 64, others=(10,), steps=20, seed=seed)
    if budget == "paper":
        return Study(100_000, 2_000, 10_000, others=(5, 10, 15, 35, 50, 75, 100), steps=30_000, batch=150, seed=seed)
    return Study(seed=seed) if model.name == "tiny" else Study(6000, 256, 256, others=(10, 50, 100), steps=300, seed=seed)


@dataclass(eq=False)
class Trained:
    """Lenses, and the text that they were trained and are tested on."""

    tokens: dict[str, Int[Tensor, "n pos"]]
    streams: dict[str, Streams]
    lenses: dict[str, Lens]


def train(model: Model, study: Study, kinds: Sequence[str] = KINDS) -> Trained:
    """Lenses of these kinds on the study's text; those in the store are loaded."""
    tokens = {part: contexts(model, getattr(study, part), study.length, study.seed, part) for part in PARTS}
    data = {part: lenses.streams(model, tokens[part]) for part in PARTS}
    own, made = LensSettings(steps=study.steps, batch=study.batch, seed=study.seed), {}
    for kind in kinds:
        of, settings, name = made["oca"] if kind == "linear" else None, own, kind
        if kind == "tuned_random":
            name, settings = "tuned", replace(own, start="random", lr=study.random_lr)
        made[kind] = lenses.train(model, data["train"], name, data["validation"], settings, of)
    return Trained(tokens, data, made)


def close(curve: Sequence[tuple[int, float, list[float]]], share: float = 0.01) -> float:
    """Seconds until the mean validation loss of all layers is within a share of its final value."""
    means = [np.mean(each) for _, _, each in curve]
    return next(seconds for (_, seconds, _), mean in zip(curve, means, strict=True) if mean <= (1 + share) * means[-1])


def losses(model: Model, study: Study, trained: Trained | None = None) -> runs.Result:
    """KL(model ‖ lens) of every lens at every layer on test contexts of several lengths; `.tensors` has each context's."""

    def compute(_):
        made, rows, each = trained or train(model, study), [], {}
        for length in (study.length, *study.others):
            same = length == study.length
            text = None if same else contexts(model, study.test, length, study.seed, "test")
            data = made.streams["test"] if same else lenses.streams(model, text)
            for name, lens in made.lenses.items():
                values = lens.losses(data)
                each |= {name: values} if same else {}
                cost = {"parameters": lens.n_parameters, "seconds": lens.about.get("seconds", 0.0)}
                cost["seconds_close"] = close(lens.about["curve"]) if lens.about else 0.0
                for layer, (loss, se) in enumerate(map(stats.mean_se, values)):
                    here = {"lens": name, "layer": layer, "length": length, "loss": loss, "se": se}
                    rows.append({**here, "n": values.shape[1], **cost})
        return {"rows": rows}, each

    return runs.run("latent_prediction", study, compute, model=model, version=VERSION, key=f"seed{study.seed}")


def below(loss: Sequence[float], threshold: float) -> int:
    """The first layer from which on the loss stays under a threshold (the last entry is the model's end)."""
    return max((i + 1 for i, value in enumerate(loss) if value >= threshold), default=0)


def anchors(name: str, column: str, model: str, perturbation: str | None = None) -> pd.DataFrame:
    """The authors' series for one of their models: a row for each layer that is known, a column for each lens."""
    table = pd.read_csv(DATA / "anchors" / f"{name}.csv")
    table = table[(table.model == model) & (perturbation is None or table.perturbation == perturbation)]
    return table.pivot(index="layer", columns="lens", values=column)[lambda wide: wide.oca.notna() & wide.tuned.notna()]


def lens_claims(result: runs.Result, n: int = 500) -> list[Claim]:
    """What §5 says of prediction losses and of their cost."""
    each = {name: value.double().numpy()[:-1].T for name, value in result.tensors.items()}  # [context layer]
    xl, small = (anchors("lens_loss", "kl", model) for model in ("gpt2-xl", "gpt2-small"))
    made, layers, cost = [], each["oca"].shape[1], result.frame().drop_duplicates("lens").set_index("lens")

    def ratio(x, y) -> float:
        return float(np.sum(x) / np.sum(y))

    def share(x, y) -> float:
        return float(np.mean(x < y))

    def add(id: str, text: str, said: float, holds: Callable, here: Callable, names=("oca", "tuned"), note: str = ""):
        value = here(*(each[name].mean(0) for name in names))
        low, high = stats.bootstrap(lambda *x: here(*(y.mean(0) for y in x)), *(each[name] for name in names), n=n)
        made.append(Claim(f"lens.{id}", text, said, value, low, high, bool(holds(value)), source=result.path.name, note=note))

    text = "OCA has much lower loss than the tuned lens (ratio of sums over layers)"
    add("oca_over_tuned", text, ratio(xl.oca, xl.tuned), lambda x: x < 1, ratio)
    text, names = "the same where the tuned lens starts at random, as the paper's did", ("oca", "tuned_random")
    add("oca_over_tuned_random", text, ratio(xl.oca, xl.tuned), lambda x: x < 1, ratio, names)
    note = f"the authors' own: {share(small.oca, small.tuned):.2f} in gpt2-small, {share(xl.oca, xl.tuned):.2f} in gpt2-xl"
    add("oca_below_tuned", "it is lower at every layer (share of layers)", 1.0, lambda x: x == 1, share, note=note)
    for other in ("mean", "resample"):
        text = f"OCA has lower loss than {other} ablation of attention (ratio of sums over layers)"
        add(f"oca_over_{other}", text, ratio(xl.oca, xl[other]), lambda x: x < 1, ratio, ("oca", other))
    text = "OCA's loss is below 0.01 from layer 35 of 48 on (share of depth; 1: never before the end)"
    note = f"the authors' own figure: from about layer {below(xl.oca.reindex(range(48)), 0.01)} on"
    add("oca_below_001", text, 35 / 48, lambda x: x < 1, lambda x: below(x, 0.01) / layers, ("oca",), note)
    text = "the tuned lens's loss is not below 0.01 even at the last layer (share of depth)"
    add("tuned_never_001", text, 1.0, lambda x: x == 1, lambda x: below(x, 0.01) / layers, ("tuned",))
    text = "OCA has far fewer parameters than the tuned lens (read: under a tenth)"
    value = float(cost.parameters["oca"] / cost.parameters["tuned"])
    made.append(Claim("lens.parameters", text, None, value, holds=value < 0.1, source=result.path.name))
    text = "OCA takes about as long to train (read: at most twice as long, to within 1 % of the final loss)"
    value = float(cost.seconds_close["oca"] / cost.seconds_close["tuned"])
    made.append(Claim("lens.seconds", text, 1.0, value, holds=value <= 2, source=result.path.name))
    return made


def own_basis(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the paper compares: every lens in its own basis."""
    return table[(table.basis == "random") | (table.basis == table.lens)]


def faithful_claims(table: pd.DataFrame, source: str = "faithfulness") -> list[Claim]:
    """What §5 and appendix H say: OCA is the more faithful at every layer, under every perturbation, by both measures."""
    made, columns = [], {"magnitude": "magnitude_corr_of_logs", "direction": "direction_similarity"}
    words = {"magnitude": "magnitude correlation", "direction": "direction similarity"}
    for ours, (theirs, how) in PERTURBATIONS.items():
        rows = own_basis(table[table.perturbation == ours])
        for measure, column in columns.items():
            wide = rows.pivot(index="layer", columns="lens", values=measure)
            paper = [anchors("faithfulness", column, model, theirs) for model in ("gpt2-small", "gpt2-xl")]
            value, *said = (float((x.oca > x.tuned).mean()) for x in (wide, *paper))
            text = f"under {how} OCA has the higher {words[measure]} at every layer (share of layers)"
            note = f"the authors' own series: {said[0]:.2f} in gpt2-small, {said[1]:.2f} in gpt2-xl"
            made.append(Claim(f"faithfulness.{ours}.{measure}", text, 1.0, value, holds=value == 1, source=source, note=note))
    return made


def claim(model_name: str, id: str) -> float:
    """Measure a claim about lenses anew, with the settings that the published result was made with."""

    def made_with(experiment: str, kind: type):
        first = runs.results(model_name, experiment).iloc[0]
        picked = {name: first.get(f"settings.{name}", first.get(name)) for name in kind.__dataclass_fields__}
        return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in picked.items()})

    model, study = load_model(model_name), made_with("latent_prediction", Study)
    if id.startswith("lens."):
        return {c.id: c.measured for c in lens_claims(losses(model, study), n=10)}[id]
    layers = sorted(set(runs.results(model_name, "faithfulness").layer))
    table = faithful(model, study, made_with("faithfulness", ff.FaithSettings), layers)
    return {c.id: c.measured for c in faithful_claims(table)}[id]


def faithful(model: Model, study: Study, settings: ff.FaithSettings, layers: Sequence[int] | None = None,
             trained: Trained | None = None) -> pd.DataFrame:  # fmt: skip
    """The table of `faithfulness` for the tuned and the OCA lens of a study."""
    made = trained or train(model, study, ("tuned", "oca", "linear"))
    probed = {name: made.lenses[name] for name in ("tuned", "oca")}
    maps = {"tuned": made.lenses["tuned"], "oca": made.lenses["linear"]}
    text = made.tokens["train"], made.tokens["test"]
    return ff.faithfulness(model, probed, maps, made.streams["train"], *text, layers, settings)
