"""Elicitation: what a lens reads from early layers before the model follows false demonstrations
(paper §5, appendix H.4).

A context is k labelled examples and a query; the lens reads the stream at the token before a label,
and its scores are those of the label words alone. Accuracy is calibrated (Halawi et al.): a context
counts as right where the true label's score is above its own (L−1)/L quantile over contexts, so
that a lens that always says the same word gets 1/L.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from oa_utils import lenses, machine, stats, store
from oa_utils.labelled import LabelledSet
from oa_utils.lenses import Lens
from oa_utils.models import Model, exact, soft_cap
from oa_utils.texts import contexts

VERSION = 2
KINDS = ("oca", "tuned", "logit")
DEMONSTRATIONS = ("true", "false")
LABEL_TOKENS = 4  # a longer label is more a sentence than a word, and its first token says little


# ---- lenses for prompts of all lengths


@dataclass(frozen=True)
class TextSettings:
    texts: int = 256  # running texts that the lenses learn from
    text_length: int = 64  # their tokens
    positions: int = 16  # tokens read in each
    steps: int = 300  # of training a lens
    seed: int = 0


@store.with_settings
def train_lenses(
    model: Model, kinds: Sequence[str] = KINDS, *, settings: TextSettings
) -> dict[str, Lens]:
    """The lenses of notebook 06, trained on tokens at all the depths of a text."""
    length = min(settings.text_length, model.n_ctx)
    sizes = {"train": settings.texts, "validation": max(2, settings.texts // 8)}
    data = {}
    for part, n in sizes.items():
        tokens = contexts(model, n, length, settings.seed, part)
        data[part] = lenses.read_several(model, tokens, settings.positions, settings.seed)
    return {
        kind: lenses.train(
            model,
            data["train"],
            kind,
            data["validation"],
            steps=settings.steps,
            look_every=max(1, settings.steps // 10),
            seed=settings.seed,
        )
        for kind in kinds
    }


# ---- prompts


@dataclass(frozen=True)
class ElicitSettings:
    n: int = 200  # contexts of a set, in whole rounds of labels; see `n_contexts`
    shots: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 10)  # demonstrations read; a context has the last
    length: int = 0  # tokens of a context at most; 0: as many as the model takes
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "shots", store.frozen(self.shots))
        store.at_least(1, n=self.n)
        if not self.shots or list(self.shots) != sorted(set(self.shots)) or self.shots[0] < 0:
            raise ValueError(f"shots grow from 0 or more: not {self.shots}")

    def n_contexts(self, labelled: LabelledSet) -> int:
        """Twice as many for more than 4 classes, four times as many for a control, which is to be
        shown to be nothing; whole rounds of labels in each half."""
        n_classes = len(labelled.classes)
        asked = self.n * (2 if n_classes > 4 else 1) * (4 if labelled.control else 1)
        return math.ceil(asked / (2 * n_classes)) * 2 * n_classes


@dataclass(frozen=True, eq=False)
class Prompts:
    """Contexts of one set: first all with true demonstrations, then the same ones with false."""

    rows: list[list[int]]  # token ids without BOS; each ends before the label of its query
    places: Int[Tensor, "both shots"]  # the token before a label, BOS counted
    labels: Int[ndarray, "n shots"]  # the label that is true of what is asked there
    shift: Int[ndarray, " n"]  # by how much the labels of false demonstrations are off
    chosen: Int[ndarray, "n examples"]  # which texts


def balanced(
    n: int, places: int, n_classes: int, rng: np.random.Generator
) -> Int[ndarray, "n places"]:
    """Classes at random, with equal counts at every place in each half of the contexts.

    n is a whole number of rounds of the classes in each half.
    """
    half = np.arange(n // 2)[:, None].repeat(places, 1) % n_classes
    return np.concatenate([rng.permuted(half, axis=0) for _ in range(2)])


def dealt(
    labels: Int[ndarray, " n"], n_classes: int, rng: np.random.Generator
) -> Int[ndarray, " n"]:
    """By how much labels are moved along the classes in each context: in balance within each half
    of the contexts that ask for one label."""
    deal = np.empty_like(labels)
    for half in np.split(np.arange(len(labels)), 2):
        for label in range(n_classes):
            rows = half[labels[half] == label]
            deal[rows] = rng.permutation(len(rows)) % n_classes
    return deal


def shortened(model: Model, labelled: LabelledSet, text: str, room: int) -> str:
    """The text's first words, so many that the example takes `room` tokens at most, whatever its
    label."""
    words = text.split(" ")
    longest = max(labelled.classes, key=lambda word: len(model.encode(f" {word}")))
    for n_words in range(len(words), 0, -1):
        shorter = " ".join(words[:n_words])
        example = labelled.separator + labelled.template.format(text=shorter, label=longest)
        if len(model.encode(example)) <= room:
            return shorter
    raise ValueError(
        f"an example of '{labelled.name}' does not fit into {room} tokens: "
        "fewer demonstrations or longer contexts"
    )


def _refuse_unfit(model: Model, labelled: LabelledSet, pools: list[ndarray], examples: int) -> None:
    """A set must have words for labels, and enough texts of each class."""
    long = [word for word in labelled.classes if len(model.encode(f" {word}")) > LABEL_TOKENS]
    if long:
        raise ValueError(
            f"labels of '{labelled.name}' have more than {LABEL_TOKENS} tokens for '{model.name}': "
            f"{', '.join(long)}"
        )
    sizes = zip(labelled.classes, map(len, pools), strict=True)
    few = [f"{word} {size}" for word, size in sizes if size < examples]
    if few:
        raise ValueError(
            f"{examples - 1} demonstrations and a query need {examples} texts of each class of "
            f"'{labelled.name}', there are only: {', '.join(few)}"
        )


@store.with_settings
def make_prompts(model: Model, labelled: LabelledSet, *, settings: ElicitSettings) -> Prompts:
    """Contexts without a text twice, no longer than the model takes, every label equally often at
    every place.

    In a control the labels are dealt anew to the classes in each context, every deal equally often
    for every label of the query, so that no word fits a class by chance.
    """
    ids = labelled.label_ids(model)
    n_classes = len(ids)
    examples = settings.shots[-1] + 1
    pools = [np.flatnonzero(np.array(labelled.labels) == i) for i in range(n_classes)]
    _refuse_unfit(model, labelled, pools, examples)
    n = settings.n_contexts(labelled)
    rng = np.random.default_rng([settings.seed, zlib.crc32(labelled.name.encode())])
    labels = balanced(n, examples, n_classes, rng)
    shift = rng.integers(1, n_classes, n)
    deal = dealt(labels[:, -1], n_classes, rng) if labelled.control else np.zeros_like(shift)
    chosen = np.empty_like(labels)
    for i, row in enumerate(labels):
        draws = [iter(rng.permutation(pool)) for pool in pools]
        chosen[i] = [next(draws[(label + deal[i]) % n_classes]) for label in row]
    room = (min(settings.length or model.n_ctx, model.n_ctx) - 1) // examples
    texts = {j: shortened(model, labelled, labelled.texts[j], room) for j in np.unique(chosen)}
    rows = []
    places = []
    for off in (np.zeros_like(shift), shift):
        for i in range(n):
            shown = (labels[i] + off[i]) % n_classes
            row, label_places = _tokens(model, labelled, [texts[j] for j in chosen[i]], shown)
            if [row[place] for place in label_places] != [ids[label] for label in shown]:
                raise ValueError(
                    f"'{labelled.name}' must put labels behind a space, as words of their own: "
                    f"{labelled.template!r}"
                )
            rows.append(row[: label_places[-1]])
            # with BOS counted, the token before a label has the label's own number in the row
            places.append([label_places[k] for k in settings.shots])
    return Prompts(rows, torch.tensor(places), labels[:, list(settings.shots)], shift, chosen)


def _tokens(
    model: Model, labelled: LabelledSet, texts: Sequence[str], labels: Sequence[int] | ndarray
) -> tuple[list[int], list[int]]:
    """Token ids of all examples, and where each one's label begins."""
    before, after = labelled.template.split("{label}")
    whole = ""
    starts = []
    for text, label in zip(texts, labels, strict=True):
        whole += (labelled.separator if whole else "") + before.format(text=text)
        starts.append(len(whole))
        whole += labelled.classes[label] + after.format(text=text)
    tokens = model.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in tokens.offset_mapping]
    return tokens.input_ids, np.searchsorted(ends, starts, side="right").tolist()


# ---- scores and accuracy


@torch.no_grad()
def label_scores(
    lens: Lens, resid: Float[Tensor, "layer rows d"], ids: Sequence[int]
) -> Float[Tensor, "layer rows label"]:
    """Log-probabilities among the labels alone, at every layer and, last, of the model itself; for
    these the labels' columns of the unembedding are enough."""
    model = lens.model
    unembed = model.bridge.unembed.original_component
    ends = torch.cat([lens.ends(resid[:-1], range(model.n_layers)), resid[-1:]])
    bias = None if getattr(unembed, "bias", None) is None else unembed.bias[ids]
    normed = model.bridge.ln_final.original_component(ends.to(model.dtype))
    logits = soft_cap(F.linear(normed, unembed.weight[ids], bias), model.logit_cap)
    return exact(logits).log_softmax(-1).float().cpu()  # or near-certain labels would tie


def correct(
    scores: Float[ndarray, "*any n label"], labels: Int[ndarray, " n"]
) -> Float[ndarray, "*any n"]:
    """Calibrated: 1 where the true label's score is above its threshold over these contexts, 1/L
    where it is equal."""
    n_classes = scores.shape[-1]
    threshold = np.quantile(scores, (n_classes - 1) / n_classes, axis=-2)[..., labels]
    true_score = scores[..., np.arange(len(labels)), labels]
    return (true_score > threshold) + (true_score == threshold) / n_classes


def measure(scores: Float[ndarray, "layer n label"], labels: Int[ndarray, " n"]) -> dict:
    """Accuracy by layer, the model's last, and by how much the lens exceeds the model.

    `maximum` is the paper's boost, of the layer which looks best on the very contexts it is
    measured on; for `boost` it is chosen on one half and measured on the other, both ways (`fair`:
    the accuracy there).
    """
    accuracy = correct(scores, labels).mean(-1)
    half = len(labels) // 2
    first, second = (
        correct(scores[:, part], labels[part]) for part in (slice(half), slice(half, None))
    )
    chosen_on_first = first[:-1].mean(-1).argmax()
    chosen_on_second = second[:-1].mean(-1).argmax()
    lens = np.concatenate([second[chosen_on_first], first[chosen_on_second]])
    model = np.concatenate([second[-1], first[-1]])
    boost, boost_se = stats.mean_se(lens - model)
    fair, fair_se = stats.mean_se(lens)
    peak = int(accuracy[:-1].argmax())
    return {
        "accuracy": accuracy.tolist(),
        "layer": peak,
        "maximum": float(accuracy[peak] - accuracy[-1]),
        "boost": boost,
        "boost_se": boost_se,
        "fair": fair,
        "fair_se": fair_se,
    }


# ---- the experiment


@store.with_settings
def score(
    model: Model, labelled: LabelledSet, readers: Mapping[str, Lens], *, settings: ElicitSettings
) -> store.Result:
    """One set read with every lens: rows of `measure`, and the scores
    [kind layer demonstrations context shots label]."""
    prompts = make_prompts(model, labelled, **asdict(settings))
    ids = labelled.label_ids(model)
    n, n_shots = prompts.labels.shape
    inputs = {
        "set": labelled.name,
        "prompts": store.fingerprint(prompts.rows, prompts.places, ids),
        "kinds": list(readers),  # in order
        "lenses": lenses.fingerprints(readers),
    }

    def compute(snapshots: store.Snapshots) -> tuple[store.Numbers, store.Tensors]:
        scores = _read_scores(model, prompts, ids, readers, snapshots)
        scores = rearrange(
            scores, "kind layer (demos n) shots label -> kind layer demos n shots label", n=n
        )
        common = {
            "set": labelled.name,
            "classes": len(ids),
            "control": labelled.control,
            "contexts": n,
        }
        rows = []
        for kind, demos, shots in product(range(len(readers)), range(2), range(n_shots)):
            part = scores[kind, :, demos, :, shots].double().numpy()
            place = {
                "kind": inputs["kinds"][kind],
                "demonstrations": DEMONSTRATIONS[demos],
                "demos": settings.shots[shots],
            }
            rows.append({**common, **place, **measure(part, prompts.labels[:, shots])})
        return {"rows": rows}, {"scores": scores}

    return store.run(
        "elicitation",
        settings,
        compute,
        model=model,
        inputs=inputs,
        version=VERSION,
        key=labelled.name,
    )


def _read_scores(
    model: Model,
    prompts: Prompts,
    ids: list[int],
    readers: Mapping[str, Lens],
    snapshots: store.Snapshots,
) -> Float[Tensor, "kind layer both shots label"]:
    """The labels' scores at every place of every context, from the last snapshot on."""
    tokens, last = model.pad(prompts.rows)
    order = last.argsort(stable=True)  # contexts of like length run together
    n_contexts, n_shots = prompts.places.shape
    shape = (len(readers), model.n_layers + 1, n_contexts, n_shots, len(ids))
    state = snapshots.load() or {"done": 0, "scores": torch.zeros(shape)}
    passes = lenses.passes(model, tokens[order], prompts.places[order], start=state["done"])
    for rows, streams, _ in passes:
        streams = rearrange(streams, "layer b shots d -> layer (b shots) d").float()
        for kind, lens in enumerate(readers.values()):
            values = label_scores(lens, streams, ids)
            state["scores"][kind][:, order[rows]] = rearrange(
                values, "layer (b shots) label -> layer b shots label", shots=n_shots
            )
        state["done"] = rows.stop
        snapshots.save_when_due(lambda: state)
    return state["scores"]


@store.with_settings
def elicit(
    model: Model,
    sets: Mapping[str, LabelledSet],
    readers: Mapping[str, Lens],
    *,
    settings: ElicitSettings,
) -> pd.DataFrame:
    """Every set read with every lens, stored set by set; a row for each set, lens, kind of
    demonstrations and number of them."""
    each = machine.progress(list(sets.values()), desc="labelled sets")
    tables = [score(model, s, readers, **asdict(settings)).frame() for s in each]
    return pd.concat(tables, ignore_index=True)
