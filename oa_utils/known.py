"""Small transformers whose circuit is known, because their weights are written by hand.

Each is a Llama (RMSNorm, rotary positions, biases, ReLU) that runs a short program over letters.
Three choices make the circuit a fact about the weights and no matter of opinion:

- The norm's epsilon is so large that it divides every stream by the same number (to one part in a
  million), and its weight multiplies that number back: the norm does nothing.
- What is known at a position stands in directions of the stream of its own (`letter`, `before`,
  ...), a random orthonormal basis: a reader reads the directions it needs and no other.
- Positions are rotations in the heads, not part of the stream. A head that looks at the token
  before gets its pattern from biases, so no edge carries a pattern that is the same for all
  prompts, and every edge of the circuit carries something about the prompt.

All other heads and MLPs are idle: they read everything by random weights and write into `junk`,
which no part of the program reads, and with `noise` also a little into everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

from oa_utils import machine
from oa_utils.circuits import Circuit
from oa_utils.graph import Edge
from oa_utils.models import Model, wrap
from oa_utils.tasks import Task

LETTERS = "ABCDEFGHIJKL"  # their ids are 1, 2, ...; BOS is 0
# directions of the stream: what stands in each, and how many it takes
FEATURES = {
    "letter": len(LETTERS),  # the token here
    "before": len(LETTERS),  # the token before
    "answer": len(LETTERS),  # what `out` reads
    "bos": 1,  # is this the first position
    "alone": 1,  # how much of a head's attention rests on BOS
    "repeated": 1,  # was this letter seen before
    "sign": 1,  # plus or minus one, by the letter
    "decoy": 1,  # what the decoy makes of it
    "junk": 23,  # what idle parts write
}
D_MODEL = sum(FEATURES.values())
D_HEAD = 32
D_MLP = 32
FAST = range(6)  # rotary pairs by which a head can tell neighbouring positions apart
SLOW = [*range(8, 16), *range(24, 32)]  # dimensions of a head that hardly turn in a short prompt
CONSTANT = SLOW[len(LETTERS)]  # one of them, for what is matched by a bias
EPSILON = 1e6
SHARP = 6.0  # nats by which attention prefers what it looks for
LOGIT = 6.0  # of the answer, over all other letters


@dataclass(frozen=True, eq=False)
class Known:
    """A model with a task that it solves, and how."""

    model: Model
    task: Task
    circuits: tuple[Circuit, ...]  # each solves it alone; several where heads are redundant
    decoys: tuple[Edge, ...] = ()  # edges that carry nothing, but must not be moved to their mean

    @property
    def n_edges(self) -> int:
        """Of the smallest circuit."""
        return min(circuit.n_edges for circuit in self.circuits)

    def agreement(self, circuit: Circuit) -> dict[str, float]:
        """Precision, recall and F1 of a circuit's edges against the true circuit nearest to it."""
        return max((_agreement(circuit, true) for true in self.circuits), key=lambda row: row["f1"])

    def auroc(self, scores: Float[Tensor, " n_edges"]) -> float:
        """How likely an edge of the true circuit scores higher than another one (ties count half),
        for the true circuit that does best."""
        ranks = torch.from_numpy(scipy.stats.rankdata(scores.double().numpy()))
        areas = []
        for mask in (circuit.mask for circuit in self.circuits):
            n = int(mask.sum())
            wins = ranks[mask].sum().item() - n * (n + 1) / 2
            areas.append(wins / (n * (len(mask) - n)))
        return max(areas)


def _agreement(found: Circuit, true: Circuit) -> dict[str, float]:
    both = int((found.mask & true.mask).sum())
    return {
        "precision": both / max(found.n_edges, 1),
        "recall": both / true.n_edges,
        "f1": 2 * both / (found.n_edges + true.n_edges),
    }


# ---- writing weights


class Weights:
    """A Llama of idle heads and MLPs into which a program is written, part by part."""

    def __init__(self, n_layers: int, n_heads: int, noise: float, seed: int):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=1 + len(LETTERS),
            hidden_size=D_MODEL,
            head_dim=D_HEAD,
            intermediate_size=D_MLP,
            num_hidden_layers=n_layers,
            num_attention_heads=n_heads,
            num_key_value_heads=n_heads,
            max_position_embeddings=32,
            rms_norm_eps=EPSILON,
            hidden_act="relu",
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.hf = LlamaForCausalLM(config).requires_grad_(False)
        self.rng = machine.generator(seed)
        self.n_layers = n_layers
        square = torch.randn(D_MODEL, D_MODEL, generator=self.rng)
        rows = torch.linalg.qr(square).Q.split(list(FEATURES.values()))
        self.features: dict[str, Float[Tensor, "size d"]] = dict(zip(FEATURES, rows, strict=True))
        self.free = [
            torch.randperm(n_heads, generator=self.rng).tolist() for _ in range(n_layers)
        ]  # heads of each layer that are idle
        self._idle(noise)
        self._ends()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def _idle(self, noise: float) -> None:
        """Random weights everywhere; what is written is about as long as what is read."""
        basis = torch.cat(list(self.features.values()))
        is_junk = torch.arange(D_MODEL) >= D_MODEL - FEATURES["junk"]
        scale = torch.where(is_junk, FEATURES["junk"] ** -0.5, noise)

        def writer(n: int) -> Float[Tensor, "d n"]:
            return basis.T @ (scale[:, None] * self._random(D_MODEL, n))

        for parameter in self.hf.parameters():
            parameter.zero_()
        for module in self.hf.modules():
            if "Norm" in type(module).__name__:
                module.weight.fill_(math.sqrt(EPSILON))
        for block in self.hf.model.layers:
            width = len(block.self_attn.q_proj.bias)
            for name in ("q_proj", "k_proj"):
                getattr(block.self_attn, name).weight.copy_(self._random(width, D_MODEL))
            values = self._random(width, D_MODEL) / math.sqrt(D_HEAD)
            block.self_attn.v_proj.weight.copy_(values)
            block.self_attn.o_proj.weight.copy_(writer(width))
            block.mlp.gate_proj.weight.copy_(self._random(D_MLP, D_MODEL))
            block.mlp.gate_proj.bias.copy_(self._random(D_MLP))
            block.mlp.up_proj.bias.fill_(1)  # so that the gate alone is a plain ReLU
            block.mlp.down_proj.weight.copy_(writer(D_MLP) / math.sqrt(D_MLP))

    def _ends(self) -> None:
        """Embeddings write `letter`, `bos` and `sign`; `out` reads `answer`."""
        letter = self.features["letter"]
        sign = torch.where(torch.arange(len(letter)) % 2 == 0, 1.0, -1.0)
        embed = torch.cat([self.features["bos"], letter])
        embed += torch.cat([torch.ones(1), sign])[:, None] * self.features["sign"]
        self.hf.model.embed_tokens.weight.copy_(embed)
        self.hf.lm_head.weight[1:] = LOGIT * self.features["answer"]

    def layers(self, n: int) -> list[int]:
        """Some layers, in order."""
        return sorted(torch.randperm(self.n_layers, generator=self.rng)[:n].tolist())

    def head(
        self, layer: int, reads: str, writes: str, times: float = 1.0
    ) -> tuple[str, dict[str, Tensor]]:
        """A head that moves a feature from where it looks to where it is, and looks nowhere yet;
        its name, and its own rows of the weights and biases of q and k."""
        index = self.free[layer].pop()
        rows = slice(index * D_HEAD, (index + 1) * D_HEAD)
        attention = self.hf.model.layers[layer].self_attn
        own = {}
        for slot in "qkv":
            projection = getattr(attention, f"{slot}_proj")
            own |= {slot: projection.weight[rows], f"{slot}_bias": projection.bias[rows]}
            own[slot].zero_()
        size = FEATURES[reads]
        own["v"][:size] = self.features[reads]
        write = attention.o_proj.weight[:, rows]
        write.zero_()
        write[:, :size] = times * self.features[writes].T
        return f"a{layer}.h{index}", own

    def mlp(self, layer: int) -> tuple[str, Any]:
        """An MLP that does nothing yet: hidden units are ReLU(gate)."""
        mlp = self.hf.model.layers[layer].mlp
        for parameter in (*mlp.gate_proj.parameters(), mlp.down_proj.weight):
            parameter.zero_()
        return f"m{layer}", mlp


def look_back(own: dict[str, Tensor], offset: int) -> None:
    """A head looks `offset` positions back: biases that rotate into each other there."""
    frequency = torch.tensor([10_000 ** (-2 * i / D_HEAD) for i in FAST])
    contrast = (1 - frequency.cos()).sum()  # of the best position over its neighbours
    size = math.sqrt(SHARP * math.sqrt(D_HEAD) / contrast)
    pairs = torch.tensor(FAST)
    own["q_bias"][pairs] = size
    own["k_bias"][pairs] = size * (offset * frequency).cos()
    own["k_bias"][pairs + D_HEAD // 2] = size * (offset * frequency).sin()


def match(
    own: dict[str, Tensor], query: Float[Tensor, "size d"], key: Float[Tensor, "size d"]
) -> None:
    """A head looks where the key's feature is what the query's feature is here."""
    size = math.sqrt(SHARP * math.sqrt(D_HEAD))
    places = SLOW[: len(query)]
    own["q"][places] = size * query
    own["k"][places] = size * key


def find(own: dict[str, Tensor], key: Float[Tensor, "1 d"]) -> None:
    """A head looks where the key's feature is largest, wherever it is itself."""
    size = math.sqrt(SHARP * math.sqrt(D_HEAD))
    own["q_bias"][CONSTANT] = size
    own["k"][CONSTANT] = size * key[0]


# ---- programs


Written = tuple[list[list[Edge]], list[Edge]]  # circuits, decoys


def copy(weights: Weights) -> Written:
    """Say the token before the last."""
    (layer,) = weights.layers(1)
    copier, own = weights.head(layer, "letter", "answer")
    look_back(own, 1)
    return [[Edge("embed", copier, "v"), Edge(copier, "out")]], []


def induction(weights: Weights, heads: int = 1) -> Written:
    """... A B ... A: say B. One head (or several, each of which would do) writes what came before
    each token, a later one looks for what the last token is."""
    early, late = weights.layers(2)
    inductor, own = weights.head(late, "letter", "answer")
    match(own, weights.features["letter"], weights.features["before"])
    common = [Edge("embed", inductor, "q"), Edge("embed", inductor, "v"), Edge(inductor, "out")]
    ways = []
    for _ in range(heads):
        before, own = weights.head(early, "letter", "before")
        look_back(own, 1)
        ways.append([Edge("embed", before, "v"), Edge(before, inductor, "k")])
    circuits = [common + way for way in ways]
    if heads > 1:
        circuits.append(common + [edge for way in ways for edge in way])
    return circuits, []


def twins(weights: Weights) -> Written:
    """Induction with two heads that write what came before: either is enough, so its circuits are
    three, with the one, with the other, with both."""
    return induction(weights, heads=2)


def duplicate(weights: Weights, with_decoy: bool = False) -> Written:
    """Say the letter that occurs twice.

    A head looks for its own letter and for BOS: its attention rests on BOS by a half where the
    letter is new, by a third where it was there before. An MLP turns and widens the difference, and
    a later head looks where it is largest.
    """
    features = weights.features
    early, late = weights.layers(2)
    seeker, own = weights.head(early, "bos", "alone")
    match(own, features["letter"], features["letter"])
    find(own, features["bos"])
    detector, mlp = weights.mlp(early)
    steepness = 1 / (1 / 2 - 1 / 3)
    mlp.gate_proj.weight[0] = -steepness * features["alone"][0]
    mlp.gate_proj.bias[0] = steepness
    mlp.down_proj.weight[:, 0] = features["repeated"][0]
    mover, own = weights.head(late, "letter", "answer")
    find(own, features["repeated"])
    circuit = [
        Edge("embed", seeker, "q"),
        Edge("embed", seeker, "k"),
        Edge(seeker, detector),
        Edge(detector, mover, "k"),
        Edge("embed", mover, "v"),
        Edge(mover, "out"),
    ]
    return [circuit], _decoy(weights, early, detector, mlp) if with_decoy else []


def _decoy(weights: Weights, layer: int, detector: str, mlp: Any) -> list[Edge]:
    """A head writes the sign of each letter, and the MLP marks down positions where it is neither
    plus nor minus one, which never happens: the sign says nothing, but its mean, zero, breaks the
    model."""
    head, own = weights.head(layer, "sign", "decoy")
    look_back(own, 0)
    sign = weights.features["decoy"][0]
    mark = 4.5 * weights.features["repeated"][0]
    for unit, side in ((1, sign), (2, -sign)):
        mlp.gate_proj.weight[unit] = side
        mlp.down_proj.weight[:, unit] = mark
    mlp.down_proj.bias.copy_(-mark)
    return [Edge("embed", head, "v"), Edge(head, detector)]


def decoy(weights: Weights) -> Written:
    """The duplicate letter again, beside a head that carries nothing and must not be moved."""
    return duplicate(weights, with_decoy=True)


# ---- prompts


Prompt = tuple[list[int], int]  # ids of letters, and the answer


def some_letters(rng: random.Random) -> Prompt:
    """Six letters; the answer is the last but one."""
    ids = rng.sample(range(1, 1 + len(LETTERS)), 6)
    return ids, ids[-2]


def a_pair_again(rng: random.Random) -> Prompt:
    """Seven letters and then one of them again; the answer is what came after it."""
    ids = rng.sample(range(1, 1 + len(LETTERS)), 7)
    at = rng.randrange(6)
    return [*ids, ids[at]], ids[at + 1]


def one_twice(rng: random.Random) -> Prompt:
    """Seven letters of which one occurs twice: the answer."""
    ids = rng.sample(range(1, 1 + len(LETTERS)), 6)
    twice = rng.choice(ids)
    ids.insert(rng.randrange(ids.index(twice) + 1, 7), twice)
    return ids, twice


def make_task(
    model: Model, make: Callable[[random.Random], Prompt], name: str, n: int, seed: int
) -> Task:
    """Random prompts; the counterfactual is another prompt of the kind, the wrong answer another
    letter of the prompt."""
    rng = random.Random(seed)
    answers: dict[tuple[int, ...], int] = {}
    while len(answers) < n:
        ids, answer = make(rng)
        answers[tuple(ids)] = answer
    rows = list(answers)
    others = [make(rng)[0] for _ in rows]
    wrong = [rng.choice(sorted(set(row) - {answer})) for row, answer in answers.items()]
    return Task.from_tokens(
        model,
        rows,
        [[answer] for answer in answers.values()],
        others,
        [[id] for id in wrong],
        name,
        seed,
        [spell(row) for row in rows],
        [spell(row) for row in others],
    )


def spell(ids: Sequence[int]) -> str:
    return " ".join(LETTERS[id - 1] for id in ids)


PROGRAMS = {
    "copy": (copy, some_letters),
    "induction": (induction, a_pair_again),
    "duplicate": (duplicate, one_twice),
    "twins": (twins, a_pair_again),
    "decoy": (decoy, one_twice),
}


def known(
    name: str,
    n_layers: int = 3,
    n_heads: int = 4,
    noise: float = 0.005,
    n: int = 128,
    seed: int = 0,
    budget: str | None = None,
) -> Known:
    """The model that runs one of PROGRAMS, with a task of n prompts and its true circuit.

    `noise` is how much each idle head and MLP writes into every direction that is read, against
    features of size 1. The seed draws the idle weights, where the program's heads stand, the
    directions and the prompts.
    """
    program, make = PROGRAMS[name]
    weights = Weights(n_layers, n_heads, noise, seed)
    circuits, decoys = program(weights)
    model = wrap(weights.hf, name="known", budget=budget)
    return Known(
        model,
        make_task(model, make, name, n, seed),
        tuple(Circuit.from_edges(model, edges, "known") for edges in circuits),
        tuple(decoys),
    )
