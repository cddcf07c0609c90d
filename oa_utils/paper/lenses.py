"""The lens chapters, notebooks 06 and 07: what is trained on which text, §5's tables and claims."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

from oa_utils import lenses, machine, stats, store
from oa_utils.faithfulness import FaithSettings, faithfulness
from oa_utils.lenses import Lens, Readings
from oa_utils.models import Model
from oa_utils.paper.claims import Claim
from oa_utils.texts import contexts

Series = Sequence[float] | np.ndarray | pd.Series  # a number for each layer

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
ANCHOR_COLUMNS = {"magnitude": "magnitude_corr_of_logs", "direction": "direction_similarity"}
MEASURES = {"magnitude": "magnitude correlation", "direction": "direction similarity"}
LENS_CLAIMS = {  # what §5 says
    "oca_over_tuned": "OCA has much lower loss than the tuned lens (ratio of sums over layers)",
    "oca_over_tuned_random": "the same where the tuned lens starts at random, as the paper's did",
    "oca_below_tuned": "it is lower at every layer (share of layers)",
    "oca_over_mean": "OCA has lower loss than mean ablation of attention (ratio of sums over "
    "layers)",
    "oca_over_resample": "OCA has lower loss than resample ablation of attention (ratio of sums "
    "over layers)",
    "oca_below_001": "OCA's loss is below 0.01 from layer 35 of 48 on (share of depth; 1: never "
    "before the end)",
    "tuned_never_001": "the tuned lens's loss is not below 0.01 even at the last layer (share of "
    "depth)",
    "parameters": "OCA has far fewer parameters than the tuned lens (read: under a tenth)",
    "training_cost": "OCA takes about as long to train (read: at most twice the multiply-adds, to "
    "within 1 % of the final loss)",
}


# ---- the study


@dataclass(frozen=True)
class Study:
    train: int = 4000  # contexts
    validation: int = 512
    test: int = 1024
    length: int = 25  # tokens of a context, BOS counted
    others: tuple[int, ...] = (5, 10, 50)  # lengths that the trained lenses are also tested on
    steps: int = 600
    batch: int = 64
    random_lr: float = 0.01  # of the tuned lens from the reference's random start: its own rate
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "others", store.frozen(self.others))


def default(model: Model, seed: int = 0) -> Study:
    """The study of both lens notebooks, so that the second finds the lenses of the first."""
    choose = partial(machine.choose, model)
    enough = model.d_model + 172  # for a covariance, and for an eighth to be held out
    return Study(
        train=choose(test=enough, small=4000, default=6000, paper=100_000),
        validation=choose(test=64, small=512, default=256, paper=2000),
        test=choose(test=64, small=1024, default=256, paper=10_000),
        others=choose(
            test=(10,),
            small=(5, 10, 50),
            default=(10, 50, 100),
            paper=(5, 10, 15, 35, 50, 75, 100),
        ),
        steps=choose(test=20, small=600, default=300, paper=30_000),
        batch=choose(test=64, small=64, default=64, paper=150),
        seed=seed,
    )


@dataclass(eq=False)
class Trained:
    """Lenses, and the text that they were trained and are tested on, by part."""

    tokens: dict[str, Int[Tensor, "n pos"]]
    readings: dict[str, Readings]
    lenses: dict[str, Lens]


def train(model: Model, study: Study, kinds: Sequence[str] = KINDS) -> Trained:
    """Lenses of these kinds on the study's text; those in the store are loaded."""
    tokens = {
        part: contexts(model, getattr(study, part), study.length, study.seed, part)
        for part in PARTS
    }
    readings = {part: lenses.read(model, tokens[part]) for part in PARTS}
    trained: dict[str, Lens] = {}
    for name in kinds:
        random = name == "tuned_random"
        trained[name] = lenses.train(
            model,
            readings["train"],
            "tuned" if random else name,
            readings["validation"],
            of=trained["oca"] if name == "linear" else None,
            steps=study.steps,
            batch=study.batch,
            lr=study.random_lr if random else 0.0,
            start="random" if random else "identity",
            seed=study.seed,
        )
    return Trained(tokens, readings, trained)


def authors_table(name: str) -> pd.DataFrame:
    """The numbers behind the authors' figures of one experiment, as they are."""
    return pd.read_csv(store.data_folder() / "anchors" / f"{name}.csv")


def anchors(
    name: str, column: str, model_name: str, perturbation: str | None = None
) -> pd.DataFrame:
    """The authors' series for one of their models: a row for each layer of which both lenses are
    known, a column for each lens."""
    table = authors_table(name)
    table = table[table.model == model_name]
    if perturbation:
        table = table[table.perturbation == perturbation]
    wide = table.pivot(index="layer", columns="lens", values=column)
    return wide[wide.oca.notna() & wide.tuned.notna()]


# ---- prediction losses


def steps_close(curve: Sequence[Sequence], share: float = 0.01) -> int:
    """Steps until the mean validation loss of all layers is within a share of its final value."""
    means = [(step, np.mean(losses)) for step, losses in curve]
    _, final = means[-1]
    return next(step for step, mean in means if mean <= (1 + share) * final)


def step_cost(model: Model, kind: str) -> float:
    """Multiply-adds that a training step takes for one context, all layers, forward alone.

    Both kinds unembed every layer; the tuned lens adds a matrix for each, OCA the later MLPs.
    """
    n = model.n_layers
    d = model.d_model
    gated = hasattr(model.bridge.blocks[0].mlp, "gate")
    mlp = (3 if gated else 2) * d * model.d_mlp
    extra = {"tuned": n * d * d, "oca": n * (n + 1) / 2 * mlp}
    return n * d * model.d_vocab + extra[kind]


def losses(model: Model, study: Study, trained: Trained) -> store.Result:
    """KL(model ‖ lens) of every lens at every layer on test contexts of several lengths, and what
    each lens cost; `.tensors` has each context's loss."""

    def compute(_: store.Snapshots) -> tuple[store.Numbers, store.Tensors]:
        rows = []
        each = {}
        costs = {name: cost(lens) for name, lens in trained.lenses.items()}
        for length in (study.length, *study.others):
            if length == study.length:
                data = trained.readings["test"]
            else:
                data = lenses.read(model, contexts(model, study.test, length, study.seed, "test"))
            for name, lens in trained.lenses.items():
                values = lens.losses(data)
                if length == study.length:
                    each[name] = values
                for layer, value in enumerate(values):
                    loss, se = stats.mean_se(value)
                    place = {"lens": name, "layer": layer, "length": length}
                    numbers = {"loss": loss, "se": se, "n": len(value)}
                    rows.append({**place, **numbers, **costs[name]})
        return {"rows": rows}, each

    prints = [lens.fingerprint for lens in trained.lenses.values()]
    inputs = {"kinds": list(trained.lenses), "lenses": store.fingerprint(prints)}
    return store.run(
        "latent_prediction",
        study,
        compute,
        model=model,
        inputs=inputs,
        version=VERSION,
        key=f"seed{study.seed}",
    )


def cost(lens: Lens) -> dict[str, float | None]:
    """Parameters, steps trained, and steps and multiply-adds until within 1 % of the final loss."""
    close = steps_close(lens.training["curve"]) if lens.training else 0
    known = lens.kind in ("tuned", "oca")
    return {
        "parameters": lens.n_parameters,
        "steps": lens.training.get("steps", 0),
        "steps_close": close,
        "multiply_adds": close * step_cost(lens.model, lens.kind) if known else None,
    }


def below(loss: Series, threshold: float) -> int:
    """The first layer from which on the loss stays under a threshold (the last entry: the end)."""
    return max((i + 1 for i, value in enumerate(loss) if value >= threshold), default=0)


def ratio_of_sums(x: Series, y: Series) -> float:
    return float(np.sum(x) / np.sum(y))


def share_lower(x: Series, y: Series) -> float:
    """At how many of all layers x is below y."""
    return float(np.mean(np.less(x, y)))


def lens_claims(result: store.Result, n: int = 500) -> list[Claim]:
    """What §5 says of prediction losses and of their cost; n resamples of an interval."""
    each = {  # [context layer], the model's end left out
        name: value.double().numpy()[:-1].T for name, value in result.tensors.items()
    }
    n_layers = each["oca"].shape[1]
    costs = result.frame().drop_duplicates("lens").set_index("lens")
    xl = anchors("lens_loss", "kl", "gpt2-xl")
    small = anchors("lens_loss", "kl", "gpt2-small")
    paper_ratio = ratio_of_sums(xl.oca, xl.tuned)
    authors_share = (
        f"the authors' own: {share_lower(small.oca, small.tuned):.2f} in gpt2-small, "
        f"{share_lower(xl.oca, xl.tuned):.2f} in gpt2-xl"
    )
    from_layer = below(xl.oca.reindex(range(48)), 0.01)
    authors_layer = f"the authors' own figure: from about layer {from_layer} on"

    def depth(loss: np.ndarray) -> float:
        return below(loss, 0.01) / n_layers

    def loss_claim(
        id: str,
        statistic: Callable[..., float],
        names: Sequence[str],
        paper_value: float,
        one: bool = False,
        note: str = "",
    ) -> Claim:
        """A statistic of the named lenses' mean losses by layer, with its bootstrap interval; it
        must be below 1 or, with `one`, equal to 1."""
        samples = [each[name] for name in names]

        def of_means(*samples: np.ndarray) -> float:
            return statistic(*(sample.mean(0) for sample in samples))

        value = of_means(*samples)
        low, high = stats.bootstrap(of_means, *samples, n=n)
        holds = bool(value == 1 if one else value < 1)
        text = LENS_CLAIMS[id]
        source = result.path.name
        return Claim(f"lens.{id}", text, paper_value, value, low, high, holds, "", source, note)

    def cost_claim(id: str, column: str, most: float, paper_value: float | None) -> Claim:
        value = float(costs[column]["oca"] / costs[column]["tuned"])
        source = result.path.name
        text = LENS_CLAIMS[id]
        return Claim(f"lens.{id}", text, paper_value, value, holds=value <= most, source=source)

    both = ("oca", "tuned")
    over_mean = ratio_of_sums(xl.oca, xl["mean"])
    over_resample = ratio_of_sums(xl.oca, xl["resample"])
    return [
        loss_claim("oca_over_tuned", ratio_of_sums, both, paper_ratio),
        loss_claim("oca_over_tuned_random", ratio_of_sums, ("oca", "tuned_random"), paper_ratio),
        loss_claim("oca_below_tuned", share_lower, both, 1.0, one=True, note=authors_share),
        loss_claim("oca_over_mean", ratio_of_sums, ("oca", "mean"), over_mean),
        loss_claim("oca_over_resample", ratio_of_sums, ("oca", "resample"), over_resample),
        loss_claim("oca_below_001", depth, ("oca",), 35 / 48, note=authors_layer),
        loss_claim("tuned_never_001", depth, ("tuned",), 1.0, one=True),
        cost_claim("parameters", "parameters", 0.1, None),
        cost_claim("training_cost", "multiply_adds", 2, 1.0),
    ]


# ---- faithfulness


@store.with_settings
def faithful(
    model: Model,
    trained: Trained,
    layers: Sequence[int] | None = None,
    *,
    settings: FaithSettings,
) -> pd.DataFrame:
    """The table of `faithfulness` for the tuned and the OCA lens of a study."""
    return faithfulness(
        model,
        {name: trained.lenses[name] for name in ("tuned", "oca")},
        {"tuned": trained.lenses["tuned"], "oca": trained.lenses["linear"]},
        trained.readings["train"],
        trained.tokens["train"],
        trained.tokens["test"],
        layers,
        **asdict(settings),
    )


def in_its_basis(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the paper compares: every lens in the basis that is its own."""
    return table[(table.basis == "random") | (table.basis == table.lens)]


def faithful_claims(table: pd.DataFrame, source: str = "faithfulness") -> list[Claim]:
    """What §5 and appendix H say: OCA is the more faithful at every layer, under every
    perturbation, by both measures."""

    def share_of_layers(wide: pd.DataFrame) -> float:
        return float((wide.oca > wide.tuned).mean())

    claims = []
    for perturbation, (anchor, words) in PERTURBATIONS.items():
        rows = in_its_basis(table[table.perturbation == perturbation])
        for measure, column in ANCHOR_COLUMNS.items():
            value = share_of_layers(rows.pivot(index="layer", columns="lens", values=measure))
            small, xl = (
                share_of_layers(anchors("faithfulness", column, name, anchor))
                for name in ("gpt2-small", "gpt2-xl")
            )
            id = f"faithfulness.{perturbation}.{measure}"
            text = (
                f"under {words} OCA has the higher {MEASURES[measure]} at every layer "
                "(share of layers)"
            )
            note = f"the authors' own series: {small:.2f} in gpt2-small, {xl:.2f} in gpt2-xl"
            claims.append(Claim(id, text, 1.0, value, holds=value == 1, source=source, note=note))
    return claims
