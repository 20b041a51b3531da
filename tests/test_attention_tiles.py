"""Tiles equal dense masked attention, values and gradients, whatever the segments, window and softcap."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast import attention_plan
from e3fast.attention_plan import AttentionPlan
from e3fast.attention_tiles import Form, tiled_attention

fragments = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4)), min_size=1)


def make_plan(shape):
    """`shape` lists fragments: prefix length (0 = none) and its suffixes' lengths."""
    lengths, prefix_of = [], []
    for prefix, suffixes in shape:
        home = len(lengths) if prefix else -1
        lengths += [prefix] * bool(prefix) + suffixes
        prefix_of += [-1] * bool(prefix) + [home] * len(suffixes)
    return torch.tensor([0, *accumulate(lengths)]), torch.tensor(prefix_of)


def visible(ends, prefix_of, window):
    """(T, T), token by token: same segment or its prefix, not later, within the window."""
    ends, rows = ends.tolist(), []
    for n, home in enumerate(prefix_of.tolist()):
        before = list(range(ends[home], ends[home + 1])) if home >= 0 else []
        for t in range(ends[n], ends[n + 1]):
            seen = (before + list(range(ends[n], t + 1)))[-window if window else 0 :]
            rows.append(torch.zeros(ends[-1], dtype=torch.bool).index_fill(0, torch.tensor(seen), True))
    return torch.stack(rows)


def dense(query, key, value, seen, form):
    q, k, v = (x.unflatten(1, (-1, 8)).transpose(0, 1) for x in (query, key, value))
    groups = form.num_heads // form.num_kv_heads
    scores = form.scaling * q @ k.repeat_interleave(groups, 0).transpose(1, 2)
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    probs = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (probs @ v.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)


@given(fragments, st.sampled_from([0, 1, 3, 7]), st.sampled_from([0.0, 2.0]), st.sampled_from([1, 3, 128]))
@settings(max_examples=60, deadline=None)
def test_tiles_equal_dense_attention(shape, window, softcap, tile):
    ends, prefix_of = make_plan(shape)
    form, generator = Form(4, 2, 0.7, softcap, window), torch.Generator().manual_seed(len(ends))
    draw = lambda heads: torch.randn(int(ends[-1]), heads * 8, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs, upstream = [draw(4).requires_grad_(), draw(2).requires_grad_(), draw(2).requires_grad_()], draw(4)
    seen, found = visible(ends, prefix_of, window), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "TILE", tile)
        for out in (
            tiled_attention(*inputs, AttentionPlan(ends, prefix_of), form),
            dense(*inputs, seen, form),
        ):
            found.append((out, *torch.autograd.grad(out, inputs, upstream)))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=1e-11, rtol=1e-11)


def test_memory_follows_the_tokens_and_not_how_often_a_prefix_is_seen():
    """131 suffixes behind 2,000 tokens: gathered at once their keys are 64 times the tokens laid out."""
    plan = AttentionPlan(*make_plan([(2000, [15] * 131)]))
    assert max(block.key_index.numel() for block in plan.blocks) <= attention_plan.MAX_COLUMNS
    assert sum(len(block.real) for block in plan.blocks) == 2000 + 131 * 15


def test_bf16_errs_no_more_than_eager_attention():
    """Scores have the inputs' dtype, as in the eager attention of transformers, and gradients are added up in fp32."""
    ends, prefix_of = make_plan([(300, [200, 150])])
    form, generator = Form(4, 2, 8**-0.5, 0.0, 0), torch.Generator().manual_seed(0)
    draw = lambda heads: (2 * torch.randn(int(ends[-1]), heads * 8, generator=generator)).bfloat16()  # noqa: E731
    inputs, upstream, seen = [draw(4), draw(2), draw(2)], draw(4), visible(ends, prefix_of, 0)

    def run(attend, dtype):
        xs = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*xs)
        return (out.detach(), *torch.autograd.grad(out, xs, upstream.to(dtype)))

    eager = lambda *xs: dense(*xs, seen, form)  # noqa: E731
    ours = run(lambda *xs: tiled_attention(*xs, AttentionPlan(ends, prefix_of), form), torch.bfloat16)
    truth, theirs = run(eager, torch.float64), run(eager, torch.bfloat16)
    for name, exact, mine, other in zip(("out", "query", "key", "value"), truth, ours, theirs, strict=True):
        error = lambda x, exact=exact: float((x.double() - exact).norm() / exact.norm())  # noqa: E731
        assert error(mine) < 1.05 * error(other), name
