"""The lens chapters, notebooks 06 and 07: what is trained on which text, §5's tables and claims."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils import lenses, machine, stats, store
from oa_utils.faithfulness import EACH, faithfulness
from oa_utils.lenses import Lens, Readings
from oa_utils.models import Model
from oa_utils.paper.claims import Claim
from oa_utils.texts import contexts

Series = Sequence[float] | np.ndarray | pd.Series  # a number for each layer

VERSION = 2
LENSES = {  # name: (kind, start of a linear map, positions of a context read: 0, as the study says)
    "logit": ("logit", "best", 1),
    "tuned": ("tuned", "best", 0),
    "tuned_identity": ("tuned", "identity", 0),
    "tuned_random": ("tuned", "random", 0),
    "mean": ("mean", "best", 1),
    "resample": ("resample", "best", 1),
    "oca": ("oca", "best", 0),
    "linear": ("linear", "best", 0),
    "tuned_last": ("tuned", "best", 1),
    "oca_last": ("oca", "best", 1),
    "oca_several": ("oca", "best", 8),
}
KINDS = tuple(LENSES)[:8]  # the others: what several positions are worth
AGAIN = ("logit", "tuned", "mean", "resample", "oca")  # trained for every seed
PERTURBATIONS = {  # ours: (the anchors' name, in words)
    "steer_random": ("steer_rand", "random perturbations"),
    "steer_basis": ("steer_sing", "basis-aligned perturbations"),
    "project_random": ("proj_rand", "random projections"),
    "project_basis": ("proj_sing", "basis-aligned projections"),
    "resample_basis": ("resample_100", "basis-aligned resample ablation"),
}
WORDS = {name: words for name, (_, words) in PERTURBATIONS.items()}
WORDS |= {name: f"{WORDS[name.removesuffix('_each')]}, Z′ for each context" for name in EACH}
ANCHOR_COLUMNS = {"magnitude": "magnitude_corr_of_logs", "direction": "direction_similarity"}
MEASURES = {"magnitude": "magnitude correlation", "direction": "direction similarity"}
MUCH = 0.8  # "much lower" is a fifth lower at least
LENS_CLAIMS = {  # what §5 says, and the rule by which it holds
    "oca_over_tuned": (
        "OCA has much lower loss than the tuned lens (ratio of sums over layers below 0.8)",
        f"< {MUCH}",
    ),
    "oca_over_tuned_random": (
        "the same where the tuned lens starts at random, as the paper's did (below 0.8)",
        f"< {MUCH}",
    ),
    "oca_below_tuned": ("it is lower at every layer (largest ratio of a layer below 1)", "< 1"),
    "oca_over_mean": (
        "OCA has much lower loss than mean ablation of attention (ratio of sums below 0.8)",
        f"< {MUCH}",
    ),
    "oca_over_resample": (
        "OCA has much lower loss than resample ablation of attention (ratio of sums below 0.8)",
        f"< {MUCH}",
    ),
    "oca_below_001": (
        "OCA's loss is below 0.01 from layer 35 of 48 on (share of depth, at most 35/48; 1: never "
        "before the end)",
        f"<= {35 / 48}",
    ),
    "tuned_never_001": (
        "the tuned lens's loss is not below 0.01 even at the last layer (share of depth: 1)",
        ">= 1",
    ),
    "training_cost": (
        "OCA takes about as long to train (read: between half and twice the multiply-adds, to "
        "within 1 % of the final loss)",
        "in [0.5, 2]",
    ),
}
_NO_CONSTANT = "later attention may bring so much of the prompt that no constant is far better than"
_LONGER = (
    "where a direction has one length of step, both lenses see that a longer step moves the model "
    "more, which leaves little room for a lead"
)
WHYS: dict[str, str] = {  # beginning of a claim's id: what may be behind its not holding
    "lens.oca_over_tuned": "a linear map that starts well and reads many rows may be a stronger "
    "rival than the paper's, which started at random",
    "lens.oca_over_tuned_random": "here even a random start is trained in whitened coordinates, "
    "which the paper's was not",
    "lens.oca_below_tuned": "a linear map may imitate at some layer what later attention writes "
    "there, which a constant cannot",
    "lens.oca_over_mean": f"{_NO_CONSTANT} the mean",
    "lens.oca_over_resample": f"{_NO_CONSTANT} another context's value",
    "lens.oca_below_001": "later attention may still bring something in the last blocks",
    "lens.tuned_never_001": "at the last layer a linear map has one block only to imitate, and "
    "one that starts well may manage",
    "lens.training_cost": "a step of OCA passes all later MLPs, so both cost the same only where "
    "the unembedding is dear beside them; and an interval needs several seeds",
    "faithfulness.": "the claim asks for a lead at every layer together, and one layer with a "
    "small, noisy or missing lead is enough for it not to hold",
    "faithfulness.steer_random.magnitude": _LONGER,
    "faithfulness.steer_basis.magnitude": _LONGER,
    "faithfulness.project_": "a projection may move the model by little, so that a measure over "
    "directions is noisy",
    "faithfulness.resample_basis": "the leading part of a basis may carry most of what either lens "
    "reads, so that both move much as the model does",
}


# ---- the study


@dataclass(frozen=True)
class Study:
    train: int = 4000  # contexts
    validation: int = 512
    test: int = 1024
    length: int = 25  # tokens of a context, BOS counted; the last one is what is predicted from
    positions: int = 8  # of each train context that linear maps read, the last one among them
    others: tuple[int, ...] = (5, 10, 50)  # lengths that the trained lenses are also tested on
    steps: int = 500
    batch: int = 256  # readings in a step
    oca_batch: int = 256
    oca_positions: int = 1  # of each train context that OCA reads
    seeds: int = 3  # trainings of the main lenses, each on train contexts of its own
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "others", store.frozen(self.others))
        store.at_least(1, seeds=self.seeds)


def default(model: Model, seed: int = 0) -> Study:
    """The study of both lens notebooks, so that the second finds the lenses of the first."""
    choose = partial(machine.choose, model)
    enough = model.d_model + 172  # for a covariance, and for an eighth to be held out
    return Study(
        train=choose(test=enough, small=4000, default=2000, paper=100_000),
        validation=choose(test=64, small=512, default=256, paper=2000),
        test=choose(test=64, small=1024, default=256, paper=10_000),
        positions=choose(test=2, small=8, default=12, paper=8),
        others=choose(
            test=(10,),
            small=(5, 10, 50),
            default=(10, 50, 100),
            paper=(5, 10, 15, 35, 50, 75, 100),
        ),
        steps=choose(test=20, small=500, default=240, paper=30_000),
        batch=choose(test=64, small=256, default=256, paper=256),
        oca_batch=choose(test=64, small=256, default=128, paper=200),
        oca_positions=choose(test=1, small=1, default=12, paper=8),
        seeds=choose(test=2, small=3, default=1, paper=3),
        seed=seed,
    )


@dataclass(eq=False)
class Trained:
    """Lenses, and the text that they were trained and are tested on, by part."""

    tokens: dict[str, Int[Tensor, "n pos"]]
    readings: dict[str, Readings]  # of last tokens
    seeds: list[dict[str, Lens]]  # lenses by name: all of the first seed, AGAIN of the others

    @property
    def lenses(self) -> dict[str, Lens]:
        return self.seeds[0]


def train(model: Model, study: Study, names: Sequence[str] = KINDS) -> Trained:
    """Lenses of these names on the study's text; those in the store are loaded."""
    tokens = {
        part: contexts(model, getattr(study, part), study.length, study.seed, part)
        for part in ("train", "validation", "test")
    }
    readings = {part: lenses.read(model, tokens[part]) for part in tokens}
    seeds = []
    for i in range(study.seeds):
        seed = study.seed + 100 * i
        text = tokens["train"] if i == 0 else contexts(model, study.train, study.length, seed)
        read = {1: readings["train"] if i == 0 else lenses.read(model, text)}
        trained: dict[str, Lens] = {}
        for name in [name for name in names if i == 0 or name in AGAIN]:
            kind, start, positions = LENSES[name]
            oca = kind == "oca"
            positions = positions or (study.oca_positions if oca else study.positions)
            if positions not in read:
                read[positions] = lenses.read_several(model, text, positions, seed)
            trained[name] = lenses.train(
                model,
                read[positions],
                kind,
                readings["validation"],
                of=trained["oca"] if kind == "linear" else None,
                steps=study.steps,
                batch=study.oca_batch if oca else study.batch,
                look_every=max(1, study.steps // 12),
                start=start,
                seed=seed,
            )
        seeds.append(trained)
    return Trained(tokens, readings, seeds)


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
    each lens cost; `.tensors` has each context's loss [seed layer context]."""

    def compute(_: store.Snapshots) -> tuple[store.Numbers, store.Tensors]:
        costs = {name: cost(lens) for name, lens in trained.lenses.items()}
        each = {}
        for name in trained.lenses:
            again = [by_name[name] for by_name in trained.seeds if name in by_name]
            each[name] = torch.stack([lens.losses(trained.readings["test"]) for lens in again])
            costs[name]["multiply_adds_by_seed"] = [cost(lens)["multiply_adds"] for lens in again]
        values = {(study.length, name): value.mean(0) for name, value in each.items()}
        for length in study.others:
            data = lenses.read(model, contexts(model, study.test, length, study.seed, "test"))
            values |= {(length, name): lens.losses(data) for name, lens in trained.lenses.items()}
        rows = []
        for (length, name), by_layer in values.items():
            for layer, value in enumerate(by_layer):
                loss, se = stats.mean_se(value)
                place = {"lens": name, "layer": layer, "length": length}
                rows.append({**place, "loss": loss, "se": se, "n": len(value), **costs[name]})
        return {"rows": rows}, each

    return store.run(
        "latent_prediction",
        study,
        compute,
        model=model,
        inputs={"lenses": [lenses.fingerprints(by_name) for by_name in trained.seeds]},
        version=VERSION,
        key=f"seed{study.seed}",
    )


def cost(lens: Lens) -> dict:
    """Parameters, steps trained, and steps and multiply-adds until within 1 % of the final loss."""
    close = steps_close(lens.training["curve"]) if lens.training else 0
    known = lens.kind in ("tuned", "oca")
    step = step_cost(lens.model, lens.kind) * lens.training["settings"]["batch"] if known else 0
    return {
        "parameters": lens.n_parameters,
        "steps": lens.training.get("steps", 0),
        "steps_close": close,
        "multiply_adds": close * step if known else None,
    }


def below(loss: Series, threshold: float) -> int:
    """The first layer from which on the loss stays under a threshold (the last entry: the end)."""
    return max((i + 1 for i, value in enumerate(loss) if value >= threshold), default=0)


def ratio_of_sums(x: Series, y: Series) -> float:
    return float(np.sum(x) / np.sum(y))


def largest_ratio(x: Series, y: Series) -> float:
    """Of x over y at the layer where it is largest."""
    return float(np.max(np.divide(x, y)))


def with_interval(
    statistic: Callable[..., float], samples: Sequence[Float[np.ndarray, "_ n layer"]], n: int
) -> tuple[float, float, float]:
    """A statistic of lenses' mean losses by layer, mean over seeds, with its 95 % interval.

    Contexts are resampled, the same ones for all lenses and seeds (n times); to that comes, as an
    independent error, the spread between seeds by Student's t.
    """
    n_seeds = max(len(sample) for sample in samples)
    each = [[sample[i % len(sample)] for sample in samples] for i in range(n_seeds)]

    def of_rows(rows: np.ndarray) -> list[float]:
        rows = rows.astype(int)
        return [statistic(*(values[rows].mean(0) for values in seed)) for seed in each]

    everything = np.arange(samples[0].shape[1])
    by_seed = of_rows(everything)
    value = float(np.mean(by_seed))
    low, high = stats.bootstrap(lambda rows: float(np.mean(of_rows(rows))), everything, n=n)
    _, _, seeds_high = stats.mean_interval(by_seed)
    half = 0.0 if seeds_high is None else seeds_high - value
    return value, value - math.hypot(value - low, half), value + math.hypot(high - value, half)


def samples_of(result: store.Result) -> dict[str, Float[np.ndarray, "seed n layer"]]:
    """Each context's losses of a result of `losses`, the model's end left out."""
    return {
        name: value.double().numpy()[:, :-1].swapaxes(1, 2)
        for name, value in result.tensors.items()
    }


def over_tuned(result: store.Result, n: int = 500) -> pd.DataFrame:
    """Each lens's loss over the tuned lens's, layer by layer, with its interval."""
    each = samples_of(result)
    rows = []
    for name, values in each.items():
        for layer in range(values.shape[-1]):
            both = [sample[..., layer : layer + 1] for sample in (values, each["tuned"])]
            ratio, low, high = with_interval(ratio_of_sums, both, n)
            place = {"lens": name, "layer": layer, "seeds": len(values)}
            rows.append({**place, "ratio": ratio, "low": low, "high": high})
    return pd.DataFrame(rows)


def lens_claims(result: store.Result, n: int = 500) -> list[Claim]:
    """What §5 says of prediction losses and of their cost; n resamples of an interval."""
    each = samples_of(result)
    n_layers = each["oca"].shape[-1]
    costs = result.frame().drop_duplicates("lens").set_index("lens")
    xl = anchors("lens_loss", "kl", "gpt2-xl")
    small = anchors("lens_loss", "kl", "gpt2-small")
    paper_ratio = ratio_of_sums(xl.oca, xl.tuned)
    authors_ratio = (
        f"the authors' own: {largest_ratio(small.oca, small.tuned):.2f} in gpt2-small, "
        f"{largest_ratio(xl.oca, xl.tuned):.2f} in gpt2-xl"
    )
    from_layer = below(xl.oca.reindex(range(48)), 0.01)
    authors_layer = f"the authors' own figure: from about layer {from_layer} on"

    def claim(id: str, **numbers) -> Claim:
        text, rule = LENS_CLAIMS[id]
        return Claim(f"lens.{id}", text, rule=rule, source=result.path.name, **numbers)

    def depth(loss: np.ndarray) -> float:
        return below(loss, 0.01) / n_layers

    def loss_claim(
        id: str,
        statistic: Callable[..., float],
        names: Sequence[str],
        paper_value: float,
        note: str = "",
    ) -> Claim:
        """Of a statistic of the named lenses' mean losses by layer."""
        samples = [each[name] for name in names]
        value, low, high = with_interval(statistic, samples, n)
        seeds = min(len(sample) for sample in samples)
        numbers = {"paper_value": paper_value, "measured": value, "low": low, "high": high}
        return claim(id, **numbers, seeds=seeds, note=note)

    by_seed = np.array([costs.multiply_adds_by_seed[name] for name in ("oca", "tuned")], float)
    cost_ratio, low, high = stats.mean_interval(by_seed[0] / by_seed[1])
    n_seeds = by_seed.shape[1]
    alike = "several seeds that agree give" if n_seeds > 1 else "one seed gives"
    undecided = f"{alike} no interval, so nothing is decided"
    both = ("oca", "tuned")
    over_mean = ratio_of_sums(xl.oca, xl["mean"])
    over_resample = ratio_of_sums(xl.oca, xl["resample"])
    return [
        loss_claim("oca_over_tuned", ratio_of_sums, both, paper_ratio),
        loss_claim("oca_over_tuned_random", ratio_of_sums, ("oca", "tuned_random"), paper_ratio),
        loss_claim("oca_below_tuned", largest_ratio, both, 1.0, note=authors_ratio),
        loss_claim("oca_over_mean", ratio_of_sums, ("oca", "mean"), over_mean),
        loss_claim("oca_over_resample", ratio_of_sums, ("oca", "resample"), over_resample),
        loss_claim("oca_below_001", depth, ("oca",), 35 / 48, note=authors_layer),
        loss_claim("tuned_never_001", depth, ("tuned",), 1.0),
        claim(
            "training_cost",
            paper_value=1.0,
            measured=cost_ratio,
            low=low,
            high=high,
            seeds=n_seeds,
            note=undecided if low is None else "",
        ),
    ]


# ---- faithfulness


def faithful(
    model: Model, trained: Trained, layers: Sequence[int] | None = None, **settings: Any
) -> pd.DataFrame:
    """The table of `faithfulness` for the tuned and the OCA lens of a study; settings as there."""
    return faithfulness(
        model,
        {name: trained.lenses[name] for name in ("tuned", "oca")},
        {"tuned": trained.lenses["tuned"], "oca": trained.lenses["linear"]},
        trained.readings["train"],
        trained.tokens["train"],
        trained.tokens["test"],
        layers,
        **settings,
    )


def in_its_basis(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the paper compares: every lens in the basis that is its own."""
    return table[(table.basis == "random") | (table.basis == table.lens)]


def leads(table: pd.DataFrame, perturbation: str, measure: str) -> pd.DataFrame:
    """By how much OCA is above the tuned lens, layer by layer, each in its own basis, and the
    standard error.

    In random directions both read the same streams, and the error is that of the difference; in
    two bases the errors are independent.
    """
    rows = in_its_basis(table[table.perturbation == perturbation]).set_index(["lens", "layer"])
    oca = rows.loc["oca"].sort_index()
    tuned = rows.loc["tuned"].sort_index()
    apart = np.hypot(oca[f"{measure}_se"], tuned[f"{measure}_se"])
    paired = oca.basis == "random"
    se = apart.where(~paired, oca[f"{measure}_lead_se"])
    return pd.DataFrame({"lead": oca[measure] - tuned[measure], "se": se})


def faithful_claims(
    table: pd.DataFrame, n_layers: int, source: str = "faithfulness"
) -> list[Claim]:
    """What §5 and appendix H say: OCA is the more faithful at every layer, under every
    perturbation, by both measures.

    Judged by the smallest lead of a layer. All layers' leads together are in their intervals with
    95 % (Bonferroni), so the smallest of them is between the smallest ends.
    """
    claims = []
    for perturbation, (anchor, words) in PERTURBATIONS.items():
        for measure, column in ANCHOR_COLUMNS.items():
            by_layer = leads(table, perturbation, measure)
            z = scipy.stats.norm.ppf(1 - 0.025 / len(by_layer))
            authors = {
                name: anchors("faithfulness", column, name, anchor)
                for name in ("gpt2-small", "gpt2-xl")
            }
            small, xl = ((wide.oca - wide.tuned).min() for wide in authors.values())
            ahead = f"ahead at {(by_layer.lead > 0).sum()} of {len(by_layer)} layers looked at"
            ahead += f" (the model has {n_layers})" if len(by_layer) < n_layers else ""
            claims.append(
                Claim(
                    f"faithfulness.{perturbation}.{measure}",
                    f"under {words} OCA has the higher {MEASURES[measure]} at every layer looked "
                    "at (smallest lead of a layer above 0)",
                    xl,
                    by_layer.lead.min(),
                    (by_layer.lead - z * by_layer.se).min(),
                    (by_layer.lead + z * by_layer.se).min(),
                    rule="> 0",
                    seeds=1,
                    source=source,
                    note=f"{ahead}; the paper's number is the authors' own series for gpt2-xl, "
                    f"in gpt2-small {small:.3f}",
                )
            )
    return claims
