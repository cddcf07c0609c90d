"""What heads look at."""

from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F

from oa_utils import machine, tasks
from oa_utils.roles import first_place, head_roles, last_of_several, patterns


def test_patterns_are_the_attention_that_the_model_uses(model):
    tokens = torch.randint(2, 50, (3, 9), generator=machine.generator(0))
    stream = model.embed(tokens)
    with torch.no_grad():
        weights = patterns(model, tokens)
        for i, (pattern, layer) in enumerate(zip(weights, model.layers, strict=True)):
            assert pattern.shape == (3, 4, 9, 9)
            assert torch.allclose(pattern.sum(-1), torch.ones(3, 4, 9), atol=1e-5)
            v = layer.heads(layer.ln1(stream), "v")
            z = pattern @ v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
            used = model.attention(i, stream)
            torch.testing.assert_close(z.transpose(1, 2), used, rtol=1e-4, atol=1e-5)
            stream = model.block(i, stream)


def test_places_of_tokens_in_prompts():
    hit = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert first_place(hit).tolist() == [1, 2, -1]
    assert last_of_several(hit).tolist() == [3, -1, -1]


def test_roles_name_what_a_head_of_the_bundled_model_looks_at(tiny):
    heads = [f"a{i}.h{j}" for i in range(tiny.n_layers) for j in range(tiny.n_heads)]
    looks = head_roles(tiny, tasks.ioi(tiny, 32), heads)
    assert list(looks.index) == heads
    assert ((looks >= 0) & (looks <= 1)).to_numpy().all()
    assert looks["last → answer"].max() > 0.4
    assert looks["last → repeat"].max() > 0.8


def test_a_task_without_such_tokens_has_no_such_role(tiny):
    years = head_roles(tiny, tasks.greater_than(tiny, 16), ["a0.h0"])
    assert years["last → repeat"].isna().all()
    prompts = ["One day Henry met Anna at the park", "Then, Scott met Donald at the school"]
    plain = tasks.Task.from_text(tiny, prompts, [" to", " to"])
    looks = head_roles(tiny, plain, ["a0.h0", "a1.h1"])
    assert looks["last → changed"].isna().all()
    assert looks["first token"].notna().all()


def test_padding_is_no_part_of_a_role(tiny):
    """The same prompts with columns behind them that no prompt has."""
    task = tasks.ioi(tiny, 24)
    names = ("tokens", "counterfactual")
    wider = {name: F.pad(getattr(task, name), (0, 4), value=tiny.bos) for name in names}
    heads = ["a0.h0", "a1.h1", "a3.h3"]
    plain = head_roles(tiny, task, heads)
    padded = head_roles(tiny, replace(task, **wider), heads)
    pd.testing.assert_frame_equal(padded, plain, atol=1e-5)


def test_no_heads_have_an_empty_table_with_its_columns(tiny):
    task = tasks.ioi(tiny, 16)
    empty = head_roles(tiny, task, [])
    one = head_roles(tiny, task, ["a0.h0"])
    assert not len(empty) and list(empty.columns) == list(one.columns)
    assert empty.index.name == one.index.name == "head"
