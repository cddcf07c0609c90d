"""Models: where they come from, and the layer-by-layer view that every experiment works on.

The only file that imports transformer_lens. `load_model` returns a frozen `Model`; `Model.run` walks the residual stream
from any layer to any other and lets an `edit` change what the components write. It calls the live modules under the
bridge directly, so hooks set on `model.bridge` do not fire in it.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from oa_utils.sources import smollm2

DATA = Path(__file__).parent.parent / "data"
BUNDLED = {"tiny": DATA / "models" / "tiny"}

# An edit sees what a component wrote and returns what is to be used instead. Sites, by layer: "resid" (the stream that
# enters the block), "z" [batch pos head d_head], "attn" [batch pos d], "hidden" (neurons), "mlp" [batch pos d].
Edit = Callable[[str, int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Layer:
    """One block's own modules, and its attention weights head by head (k and v repeated where heads share them)."""

    attn: Any
    ln1: Callable[[Tensor], Tensor]
    ln2: Callable[[Tensor], Tensor]
    mlp_hidden: Callable[[Tensor], Tensor]
    mlp_out: Callable[[Tensor], Tensor]
    n_heads: int
    W_O: Float[Tensor, "head d_head d"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, " d"]

    def qkv_weights(self) -> tuple[Float[Tensor, "3 head d d_head"], Float[Tensor, "3 head d_head"]]:
        """Weights and biases of q, k, v with one row for each query head: what an own input for each head needs."""
        weights = [self.per_head(w) for w in (self.attn.W_Q, self.attn.W_K, self.attn.W_V)]
        none = torch.zeros_like(self.b_V)
        biases = [none if b is None else self.per_head(b) for b in (self.attn.b_Q, self.attn.b_K, self.attn.b_V)]
        return torch.stack(weights), torch.stack(biases)

    def per_head(self, weight: Tensor) -> Tensor:
        return weight.repeat_interleave(self.n_heads // len(weight), dim=0)

    def heads(self, x: Tensor, slot: str) -> Float[Tensor, "batch head pos d_head"]:
        """Queries, keys or values of a normalised stream (as many heads as the model stores)."""
        out = getattr(self.attn, slot).original_component(x)
        return out.unflatten(-1, (-1, self.W_O.shape[1])).transpose(1, 2)


@dataclass(eq=False)
class Model:
    """A frozen language model; `name` and `fingerprint` go into every result."""

    name: str
    bridge: Any
    tokenizer: Any
    bos: int
    layers: list[Layer] = field(repr=False, default_factory=list)

    def __post_init__(self):
        config = self.bridge.cfg
        self.n_layers, self.n_heads, self.d_model = config.n_layers, config.n_heads, config.d_model
        self.d_head, self.d_mlp, self.d_vocab = config.d_head, config.d_mlp, config.d_vocab
        window = getattr(self.bridge.original_model.config, "sliding_window", None)
        self.n_ctx = min(config.n_ctx, window or config.n_ctx)
        weight = next(self.bridge.original_model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.fingerprint = fingerprint(self.bridge.original_model)

    def embed_tokens(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d"]:
        """Token embeddings alone, without positions: the component `tok`."""
        return self.bridge.embed.original_component(tokens)

    def add_positions(self, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
        """What enters the first block: learned positions are added here, rotary ones come in attention."""
        if hasattr(self.bridge, "pos_embed"):
            return x + self.bridge.pos_embed.original_component(torch.arange(x.shape[1], device=x.device))
        return x

    def embed(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d"]:
        return self.add_positions(self.embed_tokens(tokens))

    def rotation(self, positions: Int[Tensor, "batch pos"]) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine [batch pos d_head] of the rotary positions, or None for models without."""
        if not hasattr(self.bridge, "rotary_emb"):
            return None
        return self.bridge.rotary_emb.original_component(torch.empty(0, dtype=self.dtype, device=self.device), positions)

    def rotate(self, x: Float[Tensor, "batch head pos d_head"], rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        if rotation is None:
            return x
        cos, sin = (part.unsqueeze(1) for part in rotation)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def attention(self, layer: int, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos head d_head"]:
        """Every head's z on a normalised stream; positions count from 0 and padding is on the right."""
        block, rotation = self.layers[layer], self.rotation(torch.arange(x.shape[1], device=x.device)[None])
        q, k = (self.rotate(block.heads(x, slot), rotation) for slot in "qk")
        v = block.heads(x, "v")
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return z.transpose(1, 2)

    def attn_out(self, layer: int, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos d"]:
        return self.layers[layer].attn.o.original_component(z.flatten(-2))

    def run(self, resid: Tensor, start: int = 0, stop: int | None = None, edit: Edit | None = None) -> Tensor:
        """The stream from the input of block `start` to the input of block `stop` (default: the model's end)."""
        edit = edit or (lambda site, layer, value: value)
        for i in range(start, self.n_layers if stop is None else stop):
            block = self.layers[i]
            resid = edit("resid", i, resid)
            z = edit("z", i, self.attention(i, block.ln1(resid)))
            resid = resid + edit("attn", i, self.attn_out(i, z))
            hidden = edit("hidden", i, block.mlp_hidden(block.ln2(resid)))
            resid = resid + edit("mlp", i, block.mlp_out(hidden))
        return resid

    def log_probs(self, resid: Float[Tensor, "*any d"]) -> Float[Tensor, "*any vocab"]:
        """Final norm, unembedding, log-softmax; call it on last positions only, it is the dear part."""
        return self.bridge.unembed.original_component(self.bridge.ln_final.original_component(resid)).log_softmax(-1)

    def __call__(self, tokens: Int[Tensor, "batch pos"], last: Int[Tensor, " batch"], edit: Edit | None = None) -> Tensor:
        """Log-probabilities [batch, vocab] at each prompt's last position."""
        resid = self.run(self.embed(tokens.to(self.device)), edit=edit)
        return self.log_probs(resid[torch.arange(len(resid)), last.to(self.device)])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is: no BOS, nothing added."""
        if self.tokenizer is None:
            raise ValueError(f"model '{self.name}' has no tokenizer, so it takes tokens only; load it with one to use text")
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """Rows of ids with BOS put first, padded on the right, and the index of each row's last token."""
        longest = 1 + max(map(len, rows))
        if longest > self.n_ctx:
            raise ValueError(f"a prompt has {longest} tokens with BOS, but '{self.name}' takes at most {self.n_ctx}")
        tokens = torch.full((len(rows), longest), self.bos)
        for i, row in enumerate(rows):
            tokens[i, 1 : 1 + len(row)] = torch.tensor(row, dtype=torch.int64)
        return tokens, torch.tensor([len(row) for row in rows])

    def decode(self, ids: Tensor | Sequence[int]) -> list[str]:
        """Each id as text, for tables and axes."""
        if self.tokenizer is None:
            return [f"#{int(i)}" for i in ids]
        return [self.tokenizer.decode([int(i)]) for i in ids]


def load_model(name: str | Path, device: str | torch.device | None = None, dtype: torch.dtype = torch.float32,
               revision: str | None = None) -> Model:  # fmt: skip
    """A model by name (`tiny`, `smollm2-135m`), Hugging Face id, or folder; frozen, in eval mode, weights as they are."""
    from transformers import AutoModelForCausalLM

    source, options = _find(str(name)), {"revision": revision} if revision else {}
    try:
        with _quiet():
            hf = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager", **options)
    except (OSError, ValueError) as error:
        if Path(source).is_dir():
            raise ValueError(f"the folder '{source}' holds no model that transformers can load: {error}") from error
        raise ValueError(
            f"'{name}' is not bundled ({', '.join([*BUNDLED, 'smollm2-135m'])}), not a folder, and no Hugging Face model of "
            f"that id could be had (offline, or no such id): {str(error).splitlines()[0]}"
        ) from error
    label = str(name) if not Path(str(name)).is_dir() else Path(str(name)).resolve().name
    return wrap(hf, _tokenizer(source, options), name=label, device=device)


def wrap(hf: Any, tokenizer: Any = None, name: str = "unnamed", device: str | torch.device | None = None) -> Model:
    """A `Model` around a Hugging Face causal language model that is in memory (it is modified in place)."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    hf = hf.to(pick_device(device)).eval().requires_grad_(False)
    bos = bos_of(hf.config, tokenizer, name)
    probe = (torch.arange(12, device=hf.device)[None] * 7 + bos) % hf.config.vocab_size
    expected = hf(probe).logits.log_softmax(-1)
    try:
        with _quiet():
            on_disk = tokenizer if "name_or_path" in getattr(tokenizer, "init_kwargs", {}) else None  # it is read again
            bridge = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config, tokenizer=on_disk)
        if getattr(bridge.cfg, "parallel_attn_mlp", False):
            raise ValueError("its attention and MLP read the same stream side by side (parallel blocks)")
        model = Model(name, bridge.eval().requires_grad_(False), tokenizer, bos)
        model.layers = [_layer(block) for block in bridge.blocks]
        got = model.log_probs(model.run(model.embed(probe)))
        z = model.attention(0, model.layers[0].ln1(model.embed(probe)))
        head_sum = torch.einsum("bphe,hed->bpd", z, model.layers[0].W_O) + model.layers[0].b_O
        apart = max((got - expected).abs().max().item(), (head_sum - model.attn_out(0, z)).abs().max().item())
    except (AttributeError, KeyError, TypeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"'{name}' ({type(hf).__name__}) is of a shape that oa_utils does not support: {error}") from error
    if not apart < (2e-3 if hf.dtype == torch.float32 else 0.3):
        raise ValueError(
            f"'{name}' ({type(hf).__name__}) is not supported: rebuilt from blocks that add first attention (the sum of its "
            f"heads), then an MLP to one stream, its log-probabilities are off by {apart:.2g} (parallel blocks, norms after "
            "attention, soft-capped logits and the like are not handled)"
        )
    return model


def _layer(block: Any) -> Layer:
    """Read one block through the bridge's names, which are the same for every family."""
    attn, mlp = block.attn, block.mlp
    inner, out = getattr(mlp, "in").original_component, mlp.out.original_component
    original = mlp.original_component
    act = getattr(original, "act_fn", None) or original.act
    if hasattr(mlp, "gate"):
        gate = mlp.gate.original_component
        hidden = lambda x: act(gate(x)) * inner(x)  # noqa: E731
    else:
        hidden = lambda x: act(inner(x))  # noqa: E731
    W_O = attn.W_O
    b_V = W_O.new_zeros(W_O.shape[:2]) if attn.b_V is None else attn.b_V.repeat_interleave(len(W_O) // len(attn.b_V), dim=0)
    b_O = W_O.new_zeros(W_O.shape[2]) if attn.b_O is None else attn.b_O
    return Layer(attn, block.ln1.original_component, block.ln2.original_component, hidden, out, len(W_O), W_O, b_V, b_O)


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, else the accelerator that torch sees, else the CPU: decided here and nowhere else."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def bos_of(config: Any, tokenizer: Any, name: str) -> int:
    """The token put first: BOS, else EOS; a chat marker is no BOS, its models were trained on <|endoftext|>."""
    if tokenizer is not None and tokenizer.bos_token == "<|im_start|>" and "<|endoftext|>" in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for source in (tokenizer, config):
        for field_name in ("bos_token_id", "eos_token_id"):
            token = getattr(source, field_name, None)
            if token is not None:
                return token[0] if isinstance(token, list) else token
    raise ValueError(f"model '{name}' names no BOS and no EOS token; set config.bos_token_id before loading it")


def fingerprint(module: torch.nn.Module) -> str:
    """A hash of the shapes, the dtype and a spread of up to 4,096 values of each weight."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        flat = value.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 4096)].float().cpu().numpy()
        key = key.replace("._original_component", "")
        digest.update(f"{key}{tuple(value.shape)}{value.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def _find(name: str) -> str:
    """The folder or hub id behind a name, with an error for folders that hold no weights."""
    if name in BUNDLED:
        return str(BUNDLED[name])
    if name == "smollm2-135m":
        return str(smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"the folder '{name}' holds no config.json, so it is not a Hugging Face model folder")
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise ValueError(f"the folder '{name}' holds no weights (*.safetensors or pytorch_model.bin)")
        return str(path)
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise ValueError(f"there is no folder '{name}'")
    return name


def _tokenizer(source: str, options: dict) -> Any:
    """The model's tokenizer, or None for a folder without one."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(source, **options)


@contextmanager
def _quiet():
    """Loading bars of local files are noise; put the setting back afterwards."""
    from transformers.utils import logging

    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
