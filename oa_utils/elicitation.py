"""Elicitation: what a lens reads from early layers before the model follows false demonstrations (paper §5, appendix H.4).

A context is k labelled examples and a query; the lens reads the stream at the token before a label, and its scores are
those of the label words alone. Accuracy is calibrated (Halawi et al.): a context counts as right where the true label's
score is above its own (L−1)/L quantile over contexts, so that a lens that always says the same word gets 1/L.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from oa_utils import lenses, runs, stats
from oa_utils.labelled import LabelledSet
from oa_utils.lenses import Lens, LensSettings, Streams
from oa_utils.models import Model
from oa_utils.texts import contexts

VERSION = 1
KINDS = ("oca", "tuned", "logit")
DEMONSTRATIONS = ("true", "false")
Read = tuple[list[int], Float[Tensor, "layers+1 b places d"], Float[Tensor, "layers b places d"]]
LABEL_TOKENS = 4  # a longer label is more a sentence than a word, and its first token says little


@dataclass(frozen=True)
class ElicitSettings:
    n: int = 200  # contexts of a set, twice as many where it has more than 4 classes; rounded up to whole rounds of labels
    shots: tuple[int, ...] = (0, 1, 2, 3, 5, 7, 10)  # numbers of demonstrations read; the last is how many a context has
    length: int = 0  # tokens of a context at most; 0: as many as the model takes
    texts: int = 256  # running texts that the lenses learn from
    text_length: int = 64  # their tokens
    positions: int = 16  # tokens read in each
    steps: int = 300  # of training a lens
    seed: int = 0


@dataclass(frozen=True)
class Job(ElicitSettings):
    set: str = ""
    kinds: tuple[str, ...] = ()
    data: tuple[str, ...] = ()  # fingerprints of the contexts and the lenses


@dataclass(frozen=True, eq=False)
class Prompts:
    """Contexts of one set: first all with true demonstrations, then the same ones with false; BOS is not in `rows`."""

    rows: list[list[int]]  # each ends before the label of its query
    at: Int[Tensor, "2n shots"]  # the token before a label, BOS counted
    labels: Int[ndarray, "n shots"]  # the label that is true of what is asked there
    shift: Int[ndarray, " n"]  # by how much the labels of false demonstrations are off
    chosen: Int[ndarray, "n examples"]  # which texts


def balanced(n: int, places: int, n_classes: int, rng: np.random.Generator) -> Int[ndarray, "n places"]:
    """Classes at random, with equal counts at every place in each half of the contexts (n: whole rounds in each)."""
    half = np.arange(n // 2)[:, None].repeat(places, 1) % n_classes
    return np.concatenate([rng.permuted(half, axis=0) for _ in range(2)])


def shortened(model: Model, s: LabelledSet, text: str, room: int) -> str:
    """The text's first words, so many that the example takes no more than `room` tokens with any label."""
    words, longest = text.split(" "), max(s.classes, key=lambda word: len(model.encode(f" {word}")))
    for m in range(len(words), 0, -1):
        text = " ".join(words[:m])
        if len(model.encode(s.separator + s.template.format(text=text, label=longest))) <= room:
            return text
    raise ValueError(f"an example of '{s.name}' does not fit into {room} tokens: fewer demonstrations or longer contexts")


def prompts(model: Model, s: LabelledSet, settings: ElicitSettings) -> Prompts:
    """Contexts without a text twice, no longer than the model takes, every label equally often at every place.

    In a control the labels are dealt anew to the classes in each context, so that no word fits a class by chance.
    """
    shots, ids, L = settings.shots, s.label_ids(model), len(s.classes)
    if not shots or list(shots) != sorted(set(shots)) or shots[0] < 0 or settings.n < 1:
        raise ValueError(f"shots grow from 0 or more, n is 1 or more: not {shots}, {settings.n}")
    if long := [word for word in s.classes if len(model.encode(f" {word}")) > LABEL_TOKENS]:
        raise ValueError(f"labels of '{s.name}' have more than {LABEL_TOKENS} tokens for '{model.name}': {', '.join(long)}")
    pools = [np.flatnonzero(np.array(s.labels) == i) for i in range(L)]
    if few := [f"{s.classes[i]} {len(pool)}" for i, pool in enumerate(pools) if len(pool) <= shots[-1]]:
        raise ValueError(f"{shots[-1]} demonstrations and a query need {shots[-1] + 1} texts of each class of '{s.name}', "
                         f"there are only: {', '.join(few)}")  # fmt: skip
    n = math.ceil(settings.n * (1 + (L > 4)) / (2 * L)) * 2 * L
    rng = np.random.default_rng([settings.seed, zlib.crc32(s.name.encode())])
    labels, shift, deal = balanced(n, shots[-1] + 1, L, rng), rng.integers(1, L, n), rng.integers(L if s.control else 1, size=n)
    chosen = np.empty_like(labels)
    for i, row in enumerate(labels):
        draw = [iter(rng.permutation(pool)) for pool in pools]
        chosen[i] = [next(draw[(label + deal[i]) % L]) for label in row]
    room = (min(settings.length or model.n_ctx, model.n_ctx) - 1) // (shots[-1] + 1)
    text = {j: shortened(model, s, s.texts[j], room) for j in np.unique(chosen)}
    rows, at = [], []
    for off in (np.zeros_like(shift), shift):
        for i in range(n):
            said = (labels[i] + off[i]) % L
            row, places = _tokens(model, s, [text[j] for j in chosen[i]], said)
            if [row[p] for p in places] != [ids[c] for c in said]:
                raise ValueError(f"'{s.name}' must put labels behind a space, as words of their own: {s.template!r}")
            rows.append(row[: places[-1]])
            at.append([places[k] for k in shots])
    return Prompts(rows, torch.tensor(at), labels[:, list(shots)], shift, chosen)


def _tokens(model: Model, s: LabelledSet, texts: Sequence[str], labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of all examples, and where each one's label begins."""
    whole, starts = "", []
    before, after = s.template.split("{label}")
    for text, label in zip(texts, labels, strict=True):
        whole += (s.separator if whole else "") + before.format(text=text)
        starts.append(len(whole))
        whole += s.classes[label] + after.format(text=text)
    found = model.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in found.offset_mapping]
    return found.input_ids, np.searchsorted(ends, starts, side="right").tolist()


@torch.no_grad()
def reads(model: Model, rows: Sequence[Sequence[int]], at: Int[Tensor, "n places"], start: int = 0) -> Iterator[Read]:
    """In one forward of each row, streams and attention outputs at its places: batch by batch, from the start-th on."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    size = runs.in_a_pass(model, 1 + len(rows[order[-1]]))
    for i in runs.progress(range(start * size, len(rows), size), desc=f"reading {len(rows):,} contexts"):
        batch, kept = order[i : i + size], {"resid": [], "attn": []}
        tokens, _ = model.pad([rows[j] for j in batch])
        here = torch.arange(len(batch), device=model.device)[:, None], at[batch].to(model.device)

        def keep(site: str, layer: int, value: Tensor, kept=kept, here=here) -> Tensor:
            if site in kept:
                kept[site].append(value[here])
            return value

        end = model.run(model.embed(tokens.to(model.device)), edit=keep)[here]
        yield batch, torch.stack([*kept["resid"], end]), torch.stack(kept["attn"])


def text_streams(model: Model, tokens: Int[Tensor, "n length"], positions: int, seed: int = 0) -> Streams:
    """What lenses learn from: several tokens of each text, so that they know every length that prompts have."""
    n, length = tokens.shape
    if not 0 < positions < length:
        raise ValueError(f"a text of {length} tokens has 1 to {length - 1} positions to read (BOS left out), not {positions}")
    at = torch.stack([torch.randperm(length - 1, generator=runs.generator(seed + i))[:positions] + 1 for i in range(n)])
    parts = [parts for _, *parts in reads(model, tokens[:, 1:].tolist(), at)]
    resid, attn = (torch.cat(part, 1).transpose(1, 2).flatten(1, 2) for part in zip(*parts, strict=True))
    spread = attn.var(1, correction=0).mean(-1).clamp(min=1e-12).sqrt()
    name = runs.sha256([model.fingerprint, tokens.tolist(), at.tolist()])[:16]
    return Streams(resid, attn.mean(1), spread, attn[:, : lenses.POOL], name)


def train_lenses(model: Model, settings: ElicitSettings, kinds: Sequence[str] = KINDS) -> dict[str, Lens]:
    """The lenses of notebook 06, trained on tokens at all the depths of a text that prompts reach."""
    s, data = settings, []
    for part, n in (("train", s.texts), ("validation", max(2, s.texts // 8))):
        tokens = contexts(model, n, min(s.text_length, model.n_ctx), s.seed, part)
        data.append(text_streams(model, tokens, s.positions, s.seed))
    how = LensSettings(steps=s.steps, check=max(1, s.steps // 10), seed=s.seed)
    return {kind: lenses.train(model, data[0], kind, data[1], how) for kind in kinds}


@torch.no_grad()
def label_scores(lens: Lens, resid: Float[Tensor, "layers+1 rows d"], ids: Sequence[int]) -> Float[Tensor, "layers+1 rows L"]:
    """Log-probabilities among the labels alone, at every layer and, last, of the model itself; for these the label's
    columns of the unembedding are enough."""
    model, head = lens.model, lens.model.bridge.unembed.original_component
    ends = torch.cat([lens.ends(resid[:-1], range(model.n_layers)), resid[-1:]])
    bias = None if getattr(head, "bias", None) is None else head.bias[ids]
    logits = F.linear(model.bridge.ln_final.original_component(ends), head.weight[ids], bias)
    return logits.double().log_softmax(-1).float().cpu()  # in double, or near-certain labels would tie


def correct(scores: Float[ndarray, "*any n L"], labels: Int[ndarray, " n"]) -> Float[ndarray, "*any n"]:
    """Calibrated: 1 where the true label's score is above its threshold over these contexts, 1/L where it is equal."""
    L = scores.shape[-1]
    threshold = np.quantile(scores, (L - 1) / L, axis=-2)[..., labels]
    own = scores[..., np.arange(len(labels)), labels]
    return (own > threshold) + (own == threshold) / L


def measure(scores: Float[ndarray, "layers+1 n L"], labels: Int[ndarray, " n"]) -> dict:
    """Accuracy by layer, the model's last; `maximum` is the paper's boost, that of the layer which looks best on the very
    contexts it is measured on; for `boost` it is chosen on one half and measured on the other, both ways (`fair`: the
    accuracy there)."""
    accuracy, half = correct(scores, labels).mean(-1), len(labels) // 2
    parts = [correct(scores[:, part], labels[part]) for part in (slice(half), slice(half, None))]
    best = [part[:-1].mean(-1).argmax() for part in parts]
    lens = np.concatenate([parts[1][best[0]], parts[0][best[1]]])
    model = np.concatenate([parts[1][-1], parts[0][-1]])
    (boost, boost_se), (fair, fair_se) = stats.mean_se(lens - model), stats.mean_se(lens)
    peak = int(accuracy[:-1].argmax())
    found = {"accuracy": accuracy.tolist(), "layer": peak, "maximum": float(accuracy[peak] - accuracy[-1])}
    return found | {"boost": boost, "boost_se": boost_se, "fair": fair, "fair_se": fair_se}


def score(model: Model, s: LabelledSet, lens: Mapping[str, Lens], settings: ElicitSettings) -> runs.Result:
    """One set read with every lens: rows of `measure`, and the scores [kind layers+1 2 n shots L]."""
    made, ids, kinds = prompts(model, s, settings), s.label_ids(model), tuple(lens)
    prints = [runs.sha256([runs.sha256(v.cpu().numpy().tobytes()) for _, v in sorted(each.tensors.items())])[:16]
              for each in lens.values()]  # fmt: skip
    own = {f.name: getattr(settings, f.name) for f in fields(ElicitSettings)}
    job = Job(**own, set=s.name, kinds=kinds, data=(runs.sha256([made.rows, made.at.tolist(), ids])[:16], *prints))

    def compute(snapshots: runs.Snapshots) -> tuple[dict, dict[str, Tensor]]:
        n, P = made.labels.shape
        done, scores = 0, torch.zeros(len(kinds), model.n_layers + 1, 2 * n, P, len(ids))
        if saved := snapshots.load():
            done, scores = saved[0]["done"], saved[1]["scores"]
        for batch, resid, _ in reads(model, made.rows, made.at, done):
            for k, each in enumerate(lens.values()):
                scores[k, :, batch] = label_scores(each, resid.flatten(1, 2), ids).unflatten(1, (len(batch), P))
            done += 1
            if snapshots.due():
                snapshots.save({"done": done}, {"scores": scores})
        scores, rows = scores.unflatten(2, (2, n)), []
        about = {"set": s.name, "classes": len(ids), "control": s.control, "contexts": n}
        for (k, kind), (d, demos), (p, shots) in product(*map(enumerate, (kinds, DEMONSTRATIONS, settings.shots))):
            found = measure(scores[k, :, d, :, p].double().numpy(), made.labels[:, p])
            rows.append({**about, "kind": kind, "demonstrations": demos, "demos": shots, **found})
        return {"rows": rows}, {"scores": scores}

    return runs.run("elicitation", job, compute, model=model, version=VERSION, key=s.name)


def elicit(model: Model, sets: Mapping[str, LabelledSet], lens: Mapping[str, Lens], settings: ElicitSettings | None = None
           ) -> pd.DataFrame:  # fmt: skip
    """Every set read with every lens, stored set by set; a row for each set, lens, kind and number of demonstrations."""
    sets = runs.progress(list(sets.values()), desc="labelled sets")
    return pd.concat([score(model, s, lens, settings or ElicitSettings()).frame() for s in sets], ignore_index=True)
