"""Small masked models for searches: one whose circuit was planted, one in which every edge matters,
and a task for either."""

from functools import cache

import torch
from conftest import random_gpt2

from oa_utils.graph import Edge
from oa_utils.masked import MaskedModel
from oa_utils.models import wrap
from oa_utils.tasks import Task

VOCAB = 20
LENGTH = 6
PLANTED = [
    Edge("embed", "a0.h0", "v"),
    Edge("embed", "m1"),
    Edge("a0.h0", "m1"),
    Edge("embed", "out"),
    Edge("m1", "out"),
]


@cache
def planted_model() -> MaskedModel:
    """Two layers of two heads of which only a0.h0 (uniform attention) and m1 write, and out does
    not read a0.h0."""
    d = 32
    shape = {"n_layer": 2, "n_head": 2, "n_embd": d, "n_positions": 16}
    hf = random_gpt2(seed=3, vocab=VOCAB, **shape, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # parts of the stream that each of the three writers writes into
    place = torch.arange(d)
    tokens = (place < 12).float()
    heads = ((12 <= place) & (place < 22)).float()
    mlp = (22 <= place).float()
    first, second = hf.transformer.h
    values_of_h0 = slice(2 * d, 2 * d + d // 2)
    with torch.no_grad():
        hf.transformer.wte.weight.copy_(random(VOCAB, d) * tokens * 2)
        hf.transformer.wpe.weight.zero_()
        for weight in [*first.parameters(), *second.parameters()]:
            weight.zero_()
        for norm in (first.ln_1, first.ln_2, second.ln_1, second.ln_2, hf.transformer.ln_f):
            norm.weight.fill_(1)
            norm.bias.zero_()
        first.attn.c_attn.weight[:, values_of_h0] = random(d, d // 2) * tokens[:, None]
        first.attn.c_proj.weight[: d // 2] = 0.1 * random(d // 2, d) * heads
        read_by_m1 = (10 * heads + 0.5 * tokens)[:, None]
        second.mlp.c_fc.weight.copy_(random(d, 4 * d) * read_by_m1)
        second.mlp.c_proj.weight.copy_(0.04 * random(4 * d, d) * mlp)
        hf.lm_head.weight.copy_(random(VOCAB, d) * (tokens + mlp) * 0.7)
    return MaskedModel(wrap(hf, name="planted"))


@cache
def dense_model() -> MaskedModel:
    """A random model in which every edge matters."""
    return MaskedModel(wrap(random_gpt2(vocab=VOCAB, n_layer=2, n_positions=16), name="dense"))


def make_task(model, n: int = 64, seed: int = 0) -> Task:
    """Random prompts and counterfactuals; the most likely token is right, the next one wrong."""
    generator = torch.Generator().manual_seed(seed)
    tokens, counterfactual = torch.randint(2, VOCAB, (2, n, LENGTH), generator=generator)
    tokens[:, 0] = model.bos
    counterfactual[:, 0] = model.bos
    return task_of(model, tokens, counterfactual)


def task_of(model, tokens: torch.Tensor, counterfactual: torch.Tensor, **more) -> Task:
    """The most likely token is right, the next one wrong; every other prompt is for measuring."""
    n, length = tokens.shape
    last = torch.full((n,), length - 1)
    top = model(tokens, last).topk(2).indices
    return Task(
        "toy",
        tokens,
        last,
        right=top[:, :1],
        wrong=top[:, 1:],
        part=torch.arange(n) % 2 * 2,
        prompts=tuple(map(str, range(n))),
        counterfactual=counterfactual,
        **more,
    )
