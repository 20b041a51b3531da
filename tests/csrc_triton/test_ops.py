"""The chunked ops against their naive twins: fp64 is the truth, values and gradients, every option."""

import functools
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import csrc_triton
from csrc_triton import LossTerms, grpo, grpo_loss, linear_grpo_loss, linear_logprobs, reference
from csrc_triton.launch import chunk_rows


def inputs(t=37, h=24, v=101, dtype=torch.float64, seed=0, gap=4.0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    hidden, weight = draw(t, h), draw(v, h) * gap / h**0.5
    targets = torch.randint(0, v, (t,), generator=g)
    return hidden.to(dtype), weight.to(dtype), targets, draw


@pytest.mark.parametrize("name", ["linear_logprobs", "linear_grpo_loss", "grpo_loss"])
def test_op_and_twin_have_one_signature(name):
    op, twin = getattr(csrc_triton, name), getattr(reference, name)
    assert list(inspect.signature(op).parameters.values()) == list(inspect.signature(twin).parameters.values())


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": torch.linspace(0.5, 1.6, 37, dtype=torch.float64)},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 3.0, "temperature": 1.3},
    "kept": {"kept": (torch.arange(38) * 2, torch.arange(74) % 101)},
    "kept entropy": {"kept": (torch.arange(38) * 2, torch.arange(74) % 101), "entropy_over": "kept"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_against_twin(option, with_bias):
    hidden, weight, targets, draw = inputs()
    targets[[3, 20]] = -100
    bias = draw(101) if with_bias else None
    upstream = [draw(37), draw(37), draw(37)]
    grads = []
    for op in (linear_logprobs, reference.linear_logprobs):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        # the budget forces several chunks
        call = functools.partial(
            op, bias=leaves[2] if with_bias else None, max_extra_bytes=101 * 16 * 64, **OPTIONS[option]
        )
        out = call(leaves[0], leaves[1], targets, want_entropy=True, want_sum_sq=True)
        loss = sum((u * x).sum() for u, x in zip(upstream, (out.logprobs, out.entropy, out.sum_sq), strict=True))
        grads.append((out, torch.autograd.grad(loss, leaves)))
    for ours, theirs in zip(grads[0][0], grads[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)
    for ours, theirs in zip(grads[0][1], grads[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


def test_gradcheck():
    hidden, weight, targets, _ = inputs(t=5, h=3, v=7)
    call = lambda x, w: linear_logprobs(x, w, targets, want_entropy=True, softcap=5.0)[:2]  # noqa: E731
    assert torch.autograd.gradcheck(call, (hidden.requires_grad_(), weight.requires_grad_()))


def with_entropy_bonus(logprobs, entropy, chunk):
    return LossTerms(grpo(logprobs, entropy, chunk).loss - 0.3 * entropy, {"entropy_max": entropy.detach()})


@pytest.mark.parametrize("formula", [grpo, with_entropy_bonus])
@pytest.mark.parametrize("drop", [True, False])
def test_fused_loss_against_twin(formula, drop):
    hidden, weight, targets, draw = inputs(gap=2.0)
    advantages = draw(37)
    advantages[::3] = 0.0
    weights = draw(37).abs()
    weights[[2, 9]] = 0.0
    old = reference.linear_logprobs(hidden, weight, targets).logprobs + 0.3 * draw(37)
    data = {"advantages": advantages, "old_logprobs": old}
    results = []
    for op in (linear_grpo_loss, reference.linear_grpo_loss):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = op(x, w, targets, data, formula, weights, want_entropy=True, temperature=0.8, drop_zero_rows=drop)
        out.loss.backward()
        results.append((out.loss, out.logprobs, out.entropy, x.grad, w.grad, *out.metrics.values()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8, check_dtype=False)


def test_rows_of_weight_zero_never_reach_an_exp():
    hidden, weight, targets, draw = inputs(dtype=torch.float32)
    weights = torch.ones(37)
    weights[5] = 0.0
    advantages, old = draw(37).float(), draw(37).float()
    clean = linear_grpo_loss(hidden, weight.requires_grad_(), targets, {"advantages": advantages}, grpo, weights)
    advantages[5], old[5], targets[5] = float("nan"), float("inf"), -7
    dirty = linear_grpo_loss(hidden, weight, targets, {"advantages": advantages}, grpo, weights)
    assert dirty.loss == clean.loss and dirty.logprobs[5] == 0
    first, second = torch.autograd.grad(clean.loss, weight)[0], torch.autograd.grad(dirty.loss, weight)[0]
    assert torch.equal(first, second)


def test_on_policy_ratio_is_exactly_one():
    hidden, weight, targets, draw = inputs(dtype=torch.bfloat16)
    out = linear_grpo_loss(hidden, weight, targets, {"advantages": draw(37).float()}, grpo, torch.ones(37))
    assert float(out.metrics["ratio_max"]) == 1.0 and float(out.metrics["clipped"]) == 0.0


@given(st.integers(0, 60), st.integers(1, 40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_zero_rows_leave_the_products_exactly(zeros, seed, entropy_wanted):
    hidden, weight, targets, draw = inputs(t=61, seed=seed)
    advantages = draw(61)
    advantages[torch.randperm(61)[:zeros]] = 0.0
    found = []
    for drop in (True, False):
        x = hidden.clone().requires_grad_()
        data = {"advantages": advantages}
        out = linear_grpo_loss(
            x, weight, targets, data, grpo, torch.ones(61).double(), drop_zero_rows=drop, want_entropy=entropy_wanted
        )
        out.loss.backward()
        found.append(x.grad)
        assert int(out.num_live) == 61 - zeros
    torch.testing.assert_close(found[0], found[1], atol=1e-13, rtol=1e-12)


def test_bf16_inputs_lose_no_logit_digits():
    """fp64 on the same bf16 values is the truth; bf16 logits alone would be off by several hundredths."""
    hidden, weight, targets, draw = inputs(t=64, h=64, v=1000, dtype=torch.bfloat16, gap=8.0)
    truth = reference.linear_logprobs(hidden.double(), weight.double(), targets, want_entropy=True)
    ours = linear_logprobs(hidden, weight, targets, want_entropy=True)
    largest = float((hidden.double() @ weight.double().T).abs().max())
    assert float((ours.logprobs - truth.logprobs).abs().max()) <= 1e-5 + 5e-7 * largest
    assert float((ours.entropy - truth.entropy).abs().max()) <= 2e-5 + 5e-7 * largest
    advantages = draw(64)
    pairs = []
    for op, dtype in ((linear_grpo_loss, torch.bfloat16), (reference.linear_grpo_loss, torch.float64)):
        x, w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
        data = {"advantages": advantages.to(dtype if dtype == torch.float64 else torch.float32)}
        op(x, w, targets, data, grpo, torch.ones(64, dtype=data["advantages"].dtype)).loss.backward()
        pairs.append((x.grad.double(), w.grad.double()))
    for got, want in zip(*pairs, strict=True):
        assert float((got - want).norm() / want.norm()) <= 3e-3


def test_weight_gradient_does_not_lose_digits_over_many_chunks():
    hidden, weight, targets, draw = inputs(t=640, h=32, v=50, dtype=torch.bfloat16)
    grads = [torch.zeros(50, 32), torch.zeros(50, 32)]
    advantages = draw(640).float()
    for out, budget in zip(grads, (1, 1 << 30), strict=True):
        w = weight.clone().requires_grad_()
        loss = linear_grpo_loss(
            hidden,
            w,
            targets,
            {"advantages": advantages},
            grpo,
            torch.ones(640),
            grad_weight_out=out,
            max_extra_bytes=budget,
        ).loss
        assert w.grad is None and loss.requires_grad
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 2e-3


def test_peak_logits_follow_the_budget_and_not_the_tokens():
    """trl#3678: memory must grow with the chunk, not with T x V."""
    weight = torch.zeros(49152, 8)
    assert chunk_rows(torch.device("cpu"), weight, torch.float32, 64 << 20) * 49152 * 8 <= 64 << 20


def test_gradients_only_where_asked():
    hidden, weight, targets, draw = inputs()
    ones = torch.ones(37).double()
    for need_x, need_w in ((True, False), (False, True)):
        x, w = hidden.clone().requires_grad_(need_x), weight.clone().requires_grad_(need_w)
        linear_grpo_loss(x, w, targets, {"advantages": draw(37)}, grpo, ones).loss.backward()
        assert (x.grad is not None) == need_x and (w.grad is not None) == need_w
        linear_logprobs(x, w, targets).logprobs.sum().backward()
    with torch.no_grad():
        out = linear_grpo_loss(hidden, weight, targets, {"advantages": draw(37)}, grpo, ones)
    assert not out.loss.requires_grad


def test_no_tokens():
    hidden, weight, targets, _ = inputs(t=0)
    x = hidden.requires_grad_()
    out = linear_grpo_loss(x, weight, targets, {"advantages": torch.zeros(0)}, grpo, torch.zeros(0))
    out.loss.backward()
    assert float(out.loss) == 0 and x.grad.shape == (0, 24)
    assert linear_logprobs(x, weight, targets, want_entropy=True).entropy.shape == (0,)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_vector_loss_against_twin(kl):
    _, _, _, draw = inputs()
    lp, old, ref, adv = (draw(50) for _ in range(4))
    mask = torch.arange(50) % 4 != 0
    old[0], adv[4] = float("inf"), float("nan")  # masked: must never matter
    knobs = dict(ref_logprobs=ref, correction=draw(50).abs(), delta=1.5, beta=0.1, kl=kl, num_tokens=33.0)
    grads = []
    for op in (grpo_loss, reference.grpo_loss):
        x = lp.clone().requires_grad_()
        loss, counters = op(x, old, adv, mask, **knobs)
        loss.backward()
        grads.append((loss.detach(), x.grad, counters["tokens"]))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False)


BAD = [
    ({"hidden": torch.zeros(4, 9)}, "looks like logits"),
    ({"hidden": torch.zeros(2, 2, 3)}, "flatten batch and sequence"),
    ({"weight": torch.zeros(0, 3)}, "gather a sharded head"),
    ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must have 4 rows"),
    ({"targets": torch.full((4,), 9)}, "targets must be in [0, 9) or -100, got 9"),
    ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0.0"),
    ({"temperature": torch.tensor([1.0, 1, -1, 1])}, "got -1.0 as its smallest"),
    ({"softcap": -1.0}, "softcap must be > 0 and finite, got -1.0"),
    ({"weight": torch.zeros(9, 3).double()}, "one float type"),
    ({"backend": "cudnn"}, "backend must be 'auto' or 'torch', got 'cudnn'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_are_named(change, message):
    call = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(9, 3),
        "targets": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError) as error:
        linear_logprobs(call.pop("hidden"), call.pop("weight"), call.pop("targets"), **call)
    assert message in str(error.value)
