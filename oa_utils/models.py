"""Models: loading them, and the layer-by-layer view that every experiment works on.

The only file that imports transformer_lens. `load_model` returns a frozen `Model`. `Model.run`
walks the residual stream from any layer to any other, block by block, and lets an `edit` see and
change what the components write; `recording` makes an edit that keeps values. It calls the live
modules under the bridge directly, so hooks set on `model.bridge` do not fire in it.
"""

import functools
import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oa_utils import machine, sources, store

# An edit sees what a component computed and returns what is to be used instead. Sites, by layer, in
# this order: "resid" (the stream that enters the block), "k" and "v" [batch kv_head place d_head],
# "z" [batch pos head d_head], "attn" [batch pos d], "hidden" (neurons), "mlp" [batch pos d].
Edit = Callable[[str, int, Tensor], Tensor]
KeysValues = tuple[
    Float[Tensor, "batch kv_head place d_head"], Float[Tensor, "batch kv_head place d_head"]
]
Content = Iterator[bytes | memoryview]  # all that is told of a model, piece by piece
Item = TypeVar("Item")
Answer = TypeVar("Answer")

FLOAT32_BOUND = 1e-4  # how far log-probabilities may be from Hugging Face's own
HALF_BOUND = 0.02  # in half precision: of the largest, since rounding alone makes 0.2 nats of 25
PROBE = 12  # tokens on which a model is compared with Hugging Face's own forward
SKETCH_VOCAB = 64  # tokens of a random model that stands for another one
# what families name differently, and the bridge has no name for
ACTIVATIONS = ("act_fn", "act", "activation_fn")  # of an MLP
NORMS_OF_SCORES = re.compile("[qk]_(layer)?norm")  # what they norm is loud, whatever the weights
SCALES = ("scaling",)  # of an attention's scores; without: one over the root of a head's width
SCORE_CAPS = ("attn_logit_softcapping",)  # of an attention
LOGIT_CAPS = ("final_logit_softcapping",)  # of a configuration
WINDOWS = ("sliding_window", "window_size")  # of a configuration: how far back a token can see
WITHOUT_FLOAT64 = ("mps",)  # kinds of device
IDLE_NUMBERS = ("p", "backward_scale")  # of a module: dropout, and a hook's on gradients
# fields of a configuration that cannot change what a frozen model answers; all others are part of
# its fingerprint, so that a new kind of model needs no entry here
NO_PART_OF_THE_FORWARD = re.compile(
    "_.*|transformers_version|architectures|dtype|torch_dtype|.*_token_id|.*dropout|.*_pdrop|"
    "initializer_range|summary_.*|use_cache|output_attentions|output_hidden_states|return_dict|"
    "id2label|label2id|problem_type|task_specific_params|tokenizer_class|chunk_size_feed_forward"
)


def unchanged(site: str, layer: int, value: Tensor) -> Tensor:
    """The edit that leaves everything as it is."""
    return value


def recording(
    *sites: str, pick: Callable[[Tensor], Tensor] = lambda value: value
) -> tuple[dict[str, dict[int, Tensor]], Edit]:
    """An edit that changes nothing and keeps `pick(value)` of some sites: kept[site][layer]."""
    kept: dict[str, dict[int, Tensor]] = {site: {} for site in sites}

    def keep(site: str, layer: int, value: Tensor) -> Tensor:
        if site in kept:
            kept[site][layer] = pick(value)
        return value

    return kept, keep


def attend(
    q: Float[Tensor, "a b query d_head"],
    k: Float[Tensor, "a kv key d_head"],
    v: Float[Tensor, "a kv key width"],
    visible: Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Tensor, "a b query width"]:
    """What queries read: of the keys up to their own place, or of those that `visible` lets them
    see (as a bool, or as something added to the scores). Heads may share keys and values. Scores
    are times `scale` (default: one over the root of d_head) and softly kept below `cap`."""
    if cap is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            visible,
            is_causal=visible is None,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    group = q.shape[1] // k.shape[1]
    k, v = (repeat(x, "a kv key e -> a (kv group) key e", group=group) for x in (k, v))
    scores = einsum(q, k, "a b query e, a b key e -> a b query key")
    scores = soft_cap(scores * (scale or q.shape[-1] ** -0.5), cap)
    if visible is None:
        visible = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if visible.dtype == torch.bool:
        scores = scores.masked_fill(~visible, -torch.inf)
    else:
        scores = scores + visible
    return scores.softmax(-1) @ v


def soft_cap(x: Float[Tensor, "*any"], cap: float | None) -> Float[Tensor, "*any"]:
    """Scores or logits, softly kept between −cap and cap; None caps nothing."""
    return x if cap is None else cap * torch.tanh(x / cap)


def in_precision_of(
    x: Float[Tensor, "*any width"], module: torch.nn.Module
) -> Float[Tensor, "*any out"]:
    """module(x), with the module's weights in the type of x for this call. Copies are not kept:
    they would miss an edit of the model."""
    parts = [*module.named_parameters(), *module.named_buffers()]
    cast = {
        name: part.to(x.dtype)
        for name, part in parts
        if part.is_floating_point() and part.dtype != x.dtype
    }
    return torch.func.functional_call(module, cast, x) if cast else module(x)


class Rotation(NamedTuple):
    """How rotary positions turn the first coordinates of queries and keys, pair by pair."""

    cos: Float[Tensor, "#batch pos turned"]
    sin: Float[Tensor, "#batch pos turned"]
    neighbours: bool = False  # a pair are neighbours, not a coordinate of each half


@dataclass(frozen=True)
class Rotary:
    """Where a layer's rotations come from: the model's own module, the attention's own table, or
    nowhere. Layers that share one are equal."""

    module: Any = None
    layer_type: str | None = None  # where local and global layers turn at their own speeds
    table: Any = None  # an attention that has sines and cosines by position
    like: Tensor | None = field(default=None, compare=False)  # of the model's type, on its device

    def __call__(self, positions: Int[Tensor, "batch pos"]) -> Rotation | None:
        if self.table is not None:
            both = self.table.embed_positions[positions]
            both = repeat(both, "b pos (which pair) -> which b pos (pair two)", which=2, two=2)
            return Rotation(both[1], both[0], neighbours=True)
        if self.module is None:
            return None
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        return Rotation(*self.module(self.like, positions, **options))


def rotate(
    x: Float[Tensor, "batch head pos d_head"], rotation: Rotation | None
) -> Float[Tensor, "batch head pos d_head"]:
    """Queries or keys turned by their rotary positions; None turns nothing."""
    if rotation is None:
        return x
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        start = rotate(x[..., :turned], rotation)
        return torch.cat((start, x[..., turned:]), dim=-1)
    if rotation.neighbours:
        left, right = rearrange(x, "b head pos (pair two) -> two b head pos pair", two=2)
        across = rearrange([-right, left], "two b head pos pair -> b head pos (pair two)")
    else:
        left, right = x.chunk(2, dim=-1)
        across = torch.cat((-right, left), dim=-1)
    return (x * cos + across * sin).to(x.dtype)  # tables may be more precise than the model


@dataclass(frozen=True, eq=False)
class Layer:
    """One block's own modules, its attention weights head by head (k and v repeated where heads
    share them), and all in which families differ."""

    attn: Any
    ln1: Callable[[Tensor], Tensor]
    ln2: Callable[[Tensor], Tensor]
    mlp_hidden: Callable[[Tensor], Tensor]
    mlp_out: Callable[[Tensor], Tensor]
    n_heads: int
    W_O: Float[Tensor, "head d_head d"]
    b_O: Float[Tensor, " d"]
    rotary: Rotary
    ln1_post: Callable[[Tensor], Tensor] | None = None  # between attention and the stream
    ln2_post: Callable[[Tensor], Tensor] | None = None  # between the MLP and the stream
    norms: dict[str, Any] = field(default_factory=dict)  # of queries and keys, by slot
    scale: float | None = None  # of scores, where it is not the usual one
    cap: float | None = None  # of scores
    parallel: bool = False  # attention and MLP read the same stream

    @property
    def adds_up(self) -> bool:
        """Whether what heads write adds up to what the layer writes."""
        return self.ln1_post is None and self.ln2_post is None

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """The value biases, one row for each query head."""
        if self.attn.b_V is None:
            return self.W_O.new_zeros(self.W_O.shape[:2])
        return self.per_head(self.attn.b_V)

    def qkv_weights(
        self,
    ) -> tuple[Float[Tensor, "3 head d d_head"], Float[Tensor, "3 head d_head"]]:
        """Weights and biases of q, k, v with one row for each query head: what an own input for
        each head needs."""
        weights = [self.per_head(w) for w in (self.attn.W_Q, self.attn.W_K, self.attn.W_V)]
        none = torch.zeros_like(self.b_V)
        biases = [
            none if b is None else self.per_head(b)
            for b in (self.attn.b_Q, self.attn.b_K, self.attn.b_V)
        ]
        return torch.stack(weights), torch.stack(biases)

    def per_head(self, weight: Tensor) -> Tensor:
        """What heads share, once for each of them."""
        return repeat(weight, "kv ... -> (kv group) ...", group=self.n_heads // len(weight))

    def heads(
        self, normed: Float[Tensor, "batch pos d"], slot: str
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Queries, keys or values of a normalised stream (as many heads as the model stores)."""
        flat = self.norm_slot(getattr(self.attn, slot).original_component(normed), slot)
        return rearrange(flat, "b pos (head e) -> b head pos e", e=self.W_O.shape[1])

    def norm_slot(self, x: Float[Tensor, "*any width"], slot: str) -> Float[Tensor, "*any width"]:
        """Queries or keys as they are compared: normed where the family does so, head by head or
        all heads of a token together."""
        if slot not in self.norms:
            return x
        norm = self.norms[slot]
        parts = rearrange(x, "... (part e) -> ... part e", e=len(norm.weight))
        return rearrange(norm(parts), "... part e -> ... (part e)")

    def attend(
        self,
        q: Float[Tensor, "a b query d_head"],
        k: Float[Tensor, "a kv key d_head"],
        v: Float[Tensor, "a kv key width"],
        visible: Tensor | None = None,
    ) -> Float[Tensor, "a b query width"]:
        """What queries read, with the scale and cap of this layer's scores."""
        return attend(q, k, v, visible, self.scale, self.cap)

    def head_sum(self, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos d"]:
        """What heads add up to, before a norm that may follow."""
        return self.attn.o.original_component(rearrange(z, "b pos head e -> b pos (head e)"))

    def attn_out(self, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos d"]:
        """What attention writes into the stream."""
        total = self.head_sum(z)
        return total if self.ln1_post is None else self.ln1_post(total)

    def read_by_mlp(
        self, before: Float[Tensor, "*batch d"], between: Float[Tensor, "*batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """Of the stream without and with the layer's attention in it, the one that its MLP
        reads."""
        return before if self.parallel else between

    def mlp_written(self, hidden: Float[Tensor, "*batch d_mlp"]) -> Float[Tensor, "*batch d"]:
        """What the MLP writes into the stream, of its neurons."""
        total = self.mlp_out(hidden)
        return total if self.ln2_post is None else self.ln2_post(total)

    def mlp(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """What the MLP writes into the stream, of the stream that it reads."""
        return self.mlp_written(self.mlp_hidden(self.ln2(x)))


@dataclass(eq=False, repr=False)
class Model:
    """A frozen language model; `name` and `fingerprint` go into every result, `budget` says what
    may be spent on it."""

    name: str
    bridge: Any
    tokenizer: Any
    bos: int
    budget: str = "default"
    as_loaded: str = ""  # the fingerprint, unless it was edited since
    origin: tuple = ()  # what a worker passes to load_model; empty: in this process only
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self):
        config = self.bridge.cfg
        self.n_layers: int = config.n_layers
        self.n_heads: int = config.n_heads
        self.d_model: int = config.d_model
        self.d_head: int = config.d_head
        self.d_mlp: int = config.d_mlp
        self.d_vocab: int = config.d_vocab
        hf = self.bridge.original_model
        self.n_ctx: int = min(config.n_ctx, _first_of(hf.config, WINDOWS) or config.n_ctx)
        self.logit_cap: float | None = _first_of(hf.config, LOGIT_CAPS)
        weight = next(hf.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.n_parameters: int = sum(p.numel() for p in hf.parameters())
        self._checksum = checksum(hf)

    def __repr__(self) -> str:
        shape = f"{self.n_layers} layers × {self.n_heads} heads × {self.d_model} wide"
        return (
            f"Model('{self.name}', {shape}, {self.d_vocab:,} tokens, {self.dtype}, {self.device})"
        )

    @property
    def fingerprint(self) -> str:
        """A hash of every weight and of what shapes the forward; an edited model has another
        one."""
        hf = self.bridge.original_model
        if checksum(hf) == self._checksum:
            return self.as_loaded
        return store.fingerprint(self.as_loaded, digest_of(_content(hf), _held_beside(hf)))

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP of a layer read the same stream."""
        return self.layers[0].parallel

    @property
    def adds_up(self) -> bool:
        """Whether what the heads of every layer write adds up to what the layer writes."""
        return all(layer.adds_up for layer in self.layers)

    # ---- from tokens to the stream

    def embed_tokens(self, tokens: Int[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos d"]:
        """Token embeddings alone, without positions: the component `tok`."""
        return self.bridge.embed.original_component(tokens)

    def add_positions(self, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
        """What enters the first block: learned positions are added here, rotary ones come in
        attention."""
        if not hasattr(self.bridge, "pos_embed"):
            return x
        learned = self.bridge.pos_embed.original_component
        positions = torch.arange(x.shape[1], device=x.device) + getattr(learned, "offset", 0)
        return x + F.embedding(positions, learned.weight)

    def embed(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d"]:
        """What enters the first block; every prompt comes through here, so one that is too long
        for the model's positions or for its sliding window ends here."""
        if tokens.shape[1] > self.n_ctx:
            raise ValueError(
                f"prompts of {tokens.shape[1]} tokens, but '{self.name}' takes at most {self.n_ctx}"
            )
        return self.add_positions(self.embed_tokens(tokens.to(self.device)))

    # ---- through the blocks

    def attention(
        self,
        layer: int,
        resid: Float[Tensor, "batch pos d"],
        edit: Edit = unchanged,
        positions: Int[Tensor, "#batch pos"] | None = None,
        past: KeysValues | None = None,
        places: Int[Tensor, "#batch pos"] | None = None,
        visible: Bool[Tensor, "..."] | None = None,
        only: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch query head d_head"]:
        """Every head's z on the stream that enters a block.

        The columns of the stream stand at `positions` (default: 0, 1, …; padding is on the right).
        With `past`, keys and values of other columns, theirs are put into their `places` in it
        (default: their positions). Each column sees the places up to its own position, or what
        `visible` says. `only` asks one column of each row.
        """
        block = self.layers[layer]
        normed = block.ln1(resid)
        if positions is None:
            positions = torch.arange(resid.shape[1], device=resid.device)[None]
        rotation = block.rotary(positions)
        k = rotate(block.heads(normed, "k"), rotation)
        v = block.heads(normed, "v")
        if past is not None:
            k = put(past[0], k, positions if places is None else places)
            v = put(past[1], v, positions if places is None else places)
        k = edit("k", layer, k)
        v = edit("v", layer, v)
        if only is not None:
            positions = positions.expand(len(resid), -1).gather(1, only[:, None])
            normed = column(normed, only)
            rotation = block.rotary(positions)
        q = rotate(block.heads(normed, "q"), rotation)
        if visible is None and (past is not None or only is not None):
            key_places = torch.arange(k.shape[2], device=k.device)
            visible = (key_places <= positions[..., None])[:, None]  # [batch 1 query place]
        return rearrange(block.attend(q, k, v, visible), "b head pos e -> b pos head e")

    def block(
        self,
        layer: int,
        resid: Float[Tensor, "batch pos d"],
        edit: Edit = unchanged,
        only: Int[Tensor, " batch"] | None = None,
        **attention: Any,
    ) -> Float[Tensor, "batch query d"]:
        """The stream behind one block; options as in `attention`."""
        block = self.layers[layer]
        resid = edit("resid", layer, resid)
        z = edit("z", layer, self.attention(layer, resid, edit, only=only, **attention))
        if only is not None:
            resid = column(resid, only)
        between = resid + edit("attn", layer, block.attn_out(z))
        read = block.ln2(block.read_by_mlp(resid, between))
        hidden = edit("hidden", layer, block.mlp_hidden(read))
        return between + edit("mlp", layer, block.mlp_written(hidden))

    def run(
        self,
        resid: Float[Tensor, "batch pos d"],
        start: int = 0,
        stop: int | None = None,
        edit: Edit = unchanged,
    ) -> Float[Tensor, "batch pos d"]:
        """The stream from the input of block `start` to the input of block `stop` (default: the
        model's end)."""
        for layer in range(start, self.n_layers if stop is None else stop):
            resid = self.block(layer, resid, edit)
        return resid

    def graph_bytes(self, tokens: int, start: int = 0) -> int:
        """About what the blocks from `start` on keep of so many tokens for their backward pass."""
        return 4 * tokens * (self.n_layers - start) * (14 * self.d_model + 4 * self.d_mlp)

    def finish(
        self,
        resid: Float[Tensor, "batch pos d"],
        start: int,
        last: Int[Tensor, " batch"],
        edit: Edit = unchanged,
    ) -> Float[Tensor, "batch vocab"]:
        """Log-probabilities at last positions, from the input of block `start` on; the last block
        runs there alone."""
        end = self.n_layers - 1
        if start <= end:
            resid = self.run(resid, start, end, edit)
            return self.log_probs(self.block(end, resid, edit, only=last)[:, 0])
        return self.log_probs(column(resid, last)[:, 0])

    def log_probs(self, resid: Float[Tensor, "*any d"]) -> Float[Tensor, "*any vocab"]:
        """Final norm, unembedding, log-softmax, in float32 at least: logits in half precision are
        rounded to steps of up to 0.1, which shows as KL. Call it on last positions only, it is the
        dear part."""
        resid = resid.to(torch.promote_types(self.dtype, torch.float32))
        normed = in_precision_of(resid, self.bridge.ln_final.original_component)
        logits = in_precision_of(normed, self.bridge.unembed.original_component)
        return soft_cap(logits, self.logit_cap).log_softmax(-1)

    def __call__(
        self,
        tokens: Int[Tensor, "batch pos"],
        last: Int[Tensor, " batch"],
        edit: Edit = unchanged,
    ) -> Float[Tensor, "batch vocab"]:
        """Log-probabilities at each prompt's last position."""
        resid = self.run(self.embed(tokens), edit=edit)
        return self.log_probs(column(resid, last.to(self.device))[:, 0])

    # ---- text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is: no BOS, nothing added."""
        if self.tokenizer is None:
            raise ValueError(
                f"model '{self.name}' has no tokenizer, so it takes tokens only; load it with one "
                "to use text"
            )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @functools.cached_property
    def tokenizer_hash(self) -> str:
        """A hash of the vocabulary: tokens made with another one mean something else here."""
        if self.tokenizer is None:
            return ""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]

    def unknown_words(self, text: str) -> list[str]:
        """The pieces of a text that the tokenizer has no token for."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        ids = self.encode(text)
        if unknown is None or unknown not in ids:
            return []
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(coded.input_ids, coded.offset_mapping, strict=True)
        return [text[start:end] for id, (start, end) in pairs if id == unknown]

    def pad(
        self, rows: Sequence[Sequence[int]]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """Rows of ids with BOS put first, padded on the right, and the index of each row's last
        token."""
        longest = 1 + max(map(len, rows))
        if longest > self.n_ctx:
            raise ValueError(
                f"a prompt has {longest} tokens with BOS, but '{self.name}' takes at most "
                f"{self.n_ctx}"
            )
        tokens = torch.full((len(rows), longest), self.bos)
        for i, row in enumerate(rows):
            tokens[i, 1 : 1 + len(row)] = torch.tensor(row, dtype=torch.int64)
        return tokens, torch.tensor([len(row) for row in rows])

    def decode(self, ids: Tensor | Sequence[int | Tensor]) -> list[str]:
        """Each id as text, for tables and axes."""
        if self.tokenizer is None:
            return [f"#{int(i)}" for i in ids]
        return [self.tokenizer.decode([int(i)]) for i in ids]


def column(
    x: Float[Tensor, "batch pos d"], index: Int[Tensor, " batch"]
) -> Float[Tensor, "batch 1 d"]:
    """One column of each row."""
    rows = torch.arange(len(x), device=x.device)
    return x[rows, index][:, None]


def put(
    past: Float[Tensor, "batch kv_head place d_head"],
    new: Float[Tensor, "batch kv_head pos d_head"],
    places: Int[Tensor, "#batch pos"],
) -> Float[Tensor, "batch kv_head place d_head"]:
    """Past keys or values with new ones in some places."""
    return past.scatter(2, places[:, None, :, None].expand_as(new), new)


# ---- loading


def load_model(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    budget: str | None = None,
    tokenizer: Any = None,
) -> Model:
    """A model by name (`tiny`, `smollm2-135m`), Hugging Face id, or folder; frozen, in eval mode,
    weights as they are.

    `tokenizer`, one in memory or a folder or id to load it from, stands in for the model's own.
    `budget` (test, default, paper; else `OA_BUDGET`) is how much experiments on it may spend and
    where they store.
    """
    from transformers import AutoModelForCausalLM

    with _quiet():
        source = sources.locate(str(name))
    options = {"revision": revision} if revision else {}
    try:
        with _quiet():
            hf, report = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise ValueError(sources.why_not(str(name), source, error)) from error
    _refuse_gaps(name, report)
    is_folder = Path(source).is_dir() and str(name) not in sources.NAMES
    where = str(Path(source).resolve()) if is_folder else str(name)
    origin = {"name": where, "dtype": dtype, "revision": revision, "tokenizer": tokenizer}
    if tokenizer is None:
        tokenizer = _tokenizer(source, options)
    elif isinstance(tokenizer, str | Path):
        tokenizer = _tokenizer(str(Path(tokenizer).expanduser()), {})
        origin["tokenizer"] = str(origin["tokenizer"])
    else:
        origin = {}
    label = Path(where).name if is_folder else where
    model = wrap(hf, tokenizer, name=label, device=device, budget=budget)
    if origin:
        model.origin = tuple({**origin, "device": str(model.device)}.items())
    return model


def sketch(name: str | Path) -> Model:
    """A random model of the configuration behind a name, of few tokens and of few layers (each type
    that the configuration lists): what can be said of a model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(name).expanduser()
    with _quiet():
        source = str(folder) if folder.is_dir() else sources.locate(str(name))
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            raise ValueError(sources.why_not(str(name), source, error)) from error
        types = getattr(config, "layer_types", None) or ["all alike"]
        config.num_hidden_layers = 1 + max(types.index(layer_type) for layer_type in set(types)) + 1
        if len(types) > 1:
            config.layer_types = (types * 2)[: config.num_hidden_layers]
        config.vocab_size = SKETCH_VOCAB
        config.bos_token_id = config.eos_token_id = 1
        config.pad_token_id = None
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return wrap(hf, name=str(name))


def _refuse_gaps(name: str | Path, report: dict[str, Any]) -> None:
    """Weights that a folder lacks would be random ones: never load them."""
    for word in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(map(str, report.get(word) or []))
        if keys:
            some = ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
            raise ValueError(
                f"the weights of '{name}' do not fit its configuration: "
                f"{len(keys)} {word.replace('_', ' ')} ({some})"
            )


def wrap(
    hf: Any,
    tokenizer: Any = None,
    name: str = "unnamed",
    device: str | torch.device | None = None,
    budget: str | None = None,
) -> Model:
    """A `Model` around a Hugging Face causal language model that is in memory (it is modified in
    place)."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    hf = hf.to(pick_device(device)).eval().requires_grad_(False)
    bos = bos_of(hf.config, tokenizer, name)
    length = min(PROBE, _first_of(hf.config, WINDOWS) or PROBE)
    probe = (torch.arange(length, device=hf.device)[None] * 7 + bos) % hf.config.vocab_size
    as_loaded = fingerprint(hf)  # before the bridge gives its own names to the weights
    with _loud(hf, probe) as gain:
        expected = hf(probe).logits.float().log_softmax(-1)
    kind = type(hf).__name__
    try:
        with _quiet():
            # the bridge reads a tokenizer again from where it was saved
            saved = "name_or_path" in getattr(tokenizer, "init_kwargs", {})
            bridge = build_bridge_from_module(
                hf, kind, hf_config=hf.config, tokenizer=tokenizer if saved else None
            )
        frozen = bridge.eval().requires_grad_(False)
        model = Model(name, frozen, tokenizer, bos, machine.budget(budget), as_loaded)
        model.layers = [_layer(bridge, block) for block in bridge.blocks]
        with _loud(hf, probe, gain):
            apart = _difference(model, probe, expected)
    except (
        AttributeError,
        KeyError,
        TypeError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"'{name}' ({kind}) is of a shape that oa_utils does not support: {error}"
        ) from error
    is_half = torch.finfo(hf.dtype).bits < 32
    bound = HALF_BOUND * expected.abs().max().item() if is_half else FLOAT32_BOUND
    if not apart < bound:
        raise ValueError(
            f"'{name}' ({kind}) is not supported: rebuilt from its blocks, heads and MLPs, its "
            f"log-probabilities are off by {apart:.2g}, not below {bound:.2g}, so it computes "
            "something that is not read here (see 'A model family' in CONTRIBUTING.md)"
        )
    return model


@contextmanager
def _loud(hf: Any, probe: Int[Tensor, "1 pos"], gain: float | None = None) -> Iterator[float]:
    """A model with its norms turned up (by a power of two, so nothing is rounded) until its answers
    differ by about one nat: with small weights, a wrong scale of attention or a cap on logits would
    hardly show."""
    if gain is None:
        spread = hf(probe).logits.float().std(-1).mean().item()
        gain = 2.0 ** min(6, max(0, math.ceil(-math.log2(max(spread, 1e-9)))))
    norms = [
        module
        for name, module in hf.named_modules()
        if "Norm" in type(module).__name__ and not NORMS_OF_SCORES.search(name)
    ]
    handles = [
        norm.register_forward_hook(lambda module, given, normed: normed * gain) for norm in norms
    ]
    try:
        yield gain
    finally:
        for handle in handles:
            handle.remove()


def _difference(
    model: Model, probe: Int[Tensor, "1 pos"], expected: Float[Tensor, "1 pos vocab"]
) -> float:
    """How far the walk through the blocks, and the sum over heads, are from the model's own
    forward."""
    got = model.log_probs(model.run(model.embed(probe)))
    layer = model.layers[0]
    z = model.attention(0, model.embed(probe))
    head_sum = torch.einsum("bphe,hed->bpd", z, layer.W_O) + layer.b_O
    by_heads = (head_sum - layer.head_sum(z)).abs().max().item()
    return max((got - expected).abs().max().item(), by_heads)


def _first_of(thing: Any, names: Sequence[str], default: Any = None) -> Any:
    """The first of these fields that a module or configuration has and that says something."""
    values = (getattr(thing, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def _layer(bridge: Any, block: Any) -> Layer:
    """Read one block through the bridge's names, which are the same for every family."""
    attn, mlp = block.attn, block.mlp
    parts = {
        name: module.original_component
        for owner in (block, attn)
        for name, module in owner.submodules.items()
        if "ln" in name or "norm" in name
    }
    parallel = bool(getattr(bridge.cfg, "parallel_attn_mlp", False))
    ln1 = parts.get("ln1", torch.nn.Identity())
    ln2 = parts.get("ln2", ln1 if parallel else torch.nn.Identity())
    W_O = attn.W_O
    usual = W_O.shape[1] ** -0.5
    scale = _first_of(attn.original_component, SCALES, usual)
    return Layer(
        attn,
        ln1,
        ln2,
        _mlp_hidden(mlp),
        mlp.out.original_component,
        len(W_O),
        W_O,
        W_O.new_zeros(W_O.shape[2]) if attn.b_O is None else attn.b_O,
        _rotary(bridge, attn.original_component),
        ln1_post=parts.get("ln1_post"),
        ln2_post=parts.get("ln2_post"),
        norms={slot: parts[f"{slot}_norm"] for slot in "qk" if f"{slot}_norm" in parts},
        scale=None if math.isclose(scale, usual) else scale,
        cap=_first_of(attn.original_component, SCORE_CAPS),
        parallel=parallel,
    )


def _mlp_hidden(mlp: Any) -> Callable[[Tensor], Tensor]:
    """An MLP's neurons, of the normalised stream."""
    inner = getattr(mlp, "in").original_component
    activation = _first_of(mlp.original_component, ACTIVATIONS)
    if not hasattr(mlp, "gate"):
        return lambda x: activation(inner(x))
    gate = mlp.gate.original_component
    return lambda x: activation(gate(x)) * inner(x)


def _rotary(bridge: Any, attn: Any) -> Rotary:
    if hasattr(bridge, "rotary_emb"):
        module = bridge.rotary_emb.original_component
        layer_type = attn.layer_type if hasattr(module, "layer_types") else None
        return Rotary(module, layer_type, like=next(attn.parameters()).new_empty(0))
    return Rotary(table=attn if hasattr(attn, "embed_positions") else None)


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, else the accelerator that torch sees, else the CPU: decided here and
    nowhere else."""
    if device is not None:
        return torch.device(device)
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def exact(x: Tensor) -> Tensor:
    """In float64: where it is, or on the CPU where its device knows no float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def bos_of(config: Any, tokenizer: Any, name: str) -> int:
    """The token put first: BOS, of the tokenizer or of the configuration, else EOS (which closes
    turns where a model chats); a chat marker is no BOS, its models were trained on
    <|endoftext|>."""
    is_chat = tokenizer is not None and tokenizer.bos_token == "<|im_start|>"
    if is_chat and "<|endoftext|>" in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for field_name in ("bos_token_id", "eos_token_id"):
        for source in (tokenizer, config):
            token = getattr(source, field_name, None)
            if token is not None:
                return token[0] if isinstance(token, list) else token
    raise ValueError(
        f"model '{name}' names no BOS and no EOS token; set config.bos_token_id before loading it"
    )


def _content(module: torch.nn.Module) -> Content:
    """What the configuration says about the forward, and every byte of every weight (once, where
    several names share one)."""
    yield store.canonical(_forward_fields(module.config.to_dict()))
    seen = set()
    for name, value in sorted(module.state_dict().items()):
        place = (value.data_ptr(), value.shape, value.stride())
        if place not in seen:
            seen.add(place)
            yield from _bytes_of(name, value)


def _held_beside(module: torch.nn.Module) -> Content:
    """What a forward may depend on beside: buffers that are not saved with the weights (such as
    rotary frequencies), and numbers that modules hold (such as a norm's epsilon). They follow from
    the configuration, so they are no part of what a model is, but they can be edited."""
    saved = module.state_dict().keys()
    for name, buffer in sorted(module.named_buffers()):
        if name not in saved:
            yield from _bytes_of(name, buffer)
    for name, part in sorted(module.named_modules()):
        for field_name, value in sorted(vars(part).items()):
            if isinstance(value, float) and field_name not in IDLE_NUMBERS:
                yield f"{name}.{field_name}={value!r}".encode()


def _bytes_of(name: str, value: Tensor) -> Content:
    yield f"{name}{tuple(value.shape)}{value.dtype}".encode()
    yield value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _forward_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what cannot change an answer; fields that are None say nothing."""
    kept = {k: v for k, v in config.items() if not NO_PART_OF_THE_FORWARD.fullmatch(str(k))}
    return {
        key: _forward_fields(value) if isinstance(value, dict) else value
        for key, value in kept.items()
        if value is not None
    }


def fingerprint(module: torch.nn.Module) -> str:
    """What a model is, in 16 digits."""
    return digest_of(_content(module))


def digest_of(*contents: Content) -> str:
    digest = hashlib.sha256()
    for part in itertools.chain(*contents):
        digest.update(part)
    return digest.hexdigest()[:16]


def checksum(module: torch.nn.Module) -> int:
    """Of the same bytes and of what is held beside, several times as fast: tells whether a model
    was edited since it was loaded."""
    parts = itertools.chain(_content(module), _held_beside(module))
    return functools.reduce(lambda so_far, part: zlib.crc32(part, so_far), parts, 0)


def _tokenizer(source: str, options: dict) -> Any:
    """The model's tokenizer, or None for a folder without one."""
    from transformers import AutoTokenizer

    folder = Path(source)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:
        raise ValueError(f"the tokenizer in '{source}' cannot be loaded: {error}") from error


@contextmanager
def _quiet():
    """Loading bars of local files are noise; put the setting back afterwards."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()


# ---- workers


@functools.cache
def _loaded(origin: tuple, budget: str, fingerprint: str) -> Model:
    """A worker's own copy of a model, loaded once and refused if it is not the caller's."""
    model = load_model(**dict(origin), budget=budget)
    if model.fingerprint != fingerprint:
        raise RuntimeError(f"{model} is not what the caller has: its files were changed")
    return model


def _on_its_model(named: tuple, function: Callable, item: Any) -> Any:
    """function(model, item), of the model that a worker loads by what names it."""
    return function(_loaded(*named), item)


def each(
    function: Callable[[Model, Item], Answer], model: Model, items: Iterable[Item], desc: str = ""
) -> list[Answer]:
    """function(model, item) of each item, in order: in workers that load the model from where it
    came, or here where there is one worker only or where this process alone has the model (made in
    memory, or edited)."""
    items = list(items)
    if machine.jobs(model.device.type) == 1 or len(items) < 2:
        alone = True
    elif alone := not (model.origin and model.fingerprint == model.as_loaded):
        machine.announce(f"{model} is in this process only, so nothing runs side by side")
    if alone:
        return [function(model, item) for item in machine.progress(items, desc=desc)]
    named = (model.origin, model.budget, model.fingerprint)
    return machine.parallel(functools.partial(_on_its_model, named, function), items, desc)
