"""The variable-length kernels get every segment's own keys, its prefix's first. Their values need a GPU (tests/gpu)."""

from itertools import pairwise

import torch

from e3fast import attention_varlen
from e3fast.attention_plan import AttentionPlan
from e3fast.attention_tiles import Form, tiled_attention
from tests.test_attention_tiles import make_plan

SHAPE = [(5, [3, 9, 1]), (0, [7]), (12, [2])]


def naive_varlen(query, key, value, plan, form):
    """What a causal kernel aligned at each segment's end computes, segment by segment."""
    out = []
    for (a, b), (c, d) in zip(pairwise(plan.cu_queries.tolist()), pairwise(plan.cu_keys.tolist()), strict=True):
        assert b - a <= plan.longest_own and d - c <= plan.longest
        q, k, v = query[a:b].transpose(0, 1), key[c:d].transpose(0, 1), value[c:d].transpose(0, 1)
        k, v = (x.repeat_interleave(form.num_heads // form.num_kv_heads, 0) for x in (k, v))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        if form.window:
            seen = seen.triu(d - c - (b - a) - form.window + 1)
        scores = (form.scaling * q @ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        out.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
    return torch.cat(out)


def test_gathered_keys_give_what_tiles_give(monkeypatch):
    ends, prefix_of = make_plan(SHAPE)
    monkeypatch.setattr(attention_varlen, "find_kernel", lambda query, plan, form: "torch")
    monkeypatch.setattr(attention_varlen, "torch_varlen", naive_varlen)
    for window in (0, 4):
        form, found = Form(4, 2, 0.5, 0.0, window), []
        q, k, v = (torch.randn(int(ends[-1]), h, 8, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
        plan = AttentionPlan(ends, prefix_of)
        for out in (
            attention_varlen.varlen_attention(q, k, v, plan, form).flatten(1),
            tiled_attention(q.flatten(1), k.flatten(1), v.flatten(1), plan, form),
        ):
            found.append((out, *torch.autograd.grad(out.cos().sum(), (q, k, v))))
        for ours, want in zip(*found, strict=True):
            torch.testing.assert_close(ours, want, atol=1e-12, rtol=1e-12)


def test_pytorch_takes_the_call():
    """Shapes and names alone, on the meta device."""
    assert attention_varlen.torch_takes_groups()
    ends, prefix_of = make_plan(SHAPE)
    plan = AttentionPlan(ends, prefix_of)
    q, k = torch.empty(39, 4, 8, device="meta"), torch.empty(len(plan.key_index), 2, 8, device="meta")
    for window in (0, 4):
        out = attention_varlen.torch_varlen(q, k, k, plan, Form(4, 2, 0.5, 0.0, window))
        assert out.shape == q.shape and out.device.type == "meta"


def test_a_kernel_is_chosen_only_for_what_it_takes():
    plan = AttentionPlan(*make_plan([(0, [3])]))
    query = torch.empty(3, 4, 64, dtype=torch.bfloat16)
    assert attention_varlen.find_kernel(query, plan, Form(4, 2, 0.5, 0.0, 0)) == ""  # a CPU has none
