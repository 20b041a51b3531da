"""linear_grpo_loss: equal to the twin in value and gradient for every scope, and exact in what it leaves out."""

import functools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csrc_triton import LossTerms, grpo, grpo_loss, linear_grpo_loss, linear_logprobs, reference
from csrc_triton.linear_loss import tell_of_long_sequences, whole_sequences
from csrc_triton.rows import fitting_rows
from tests.csrc_triton.inputs import draws, inputs, peaked, relative


def with_entropy_bonus(logprobs, entropy, chunk):
    return LossTerms(grpo(logprobs, entropy, chunk).loss - 0.3 * entropy, {"entropy_max": entropy.detach()})


def of_sequences(logprobs, entropy, chunk):
    """A clipped ratio of whole sequences: the gradient at a row depends on its sequence."""
    gap = (logprobs - chunk["old_logprobs"]).clamp(-20, 20)
    sizes = torch.zeros(chunk.num_seqs, dtype=gap.dtype).index_add(0, chunk.seq_ids, torch.ones_like(gap))
    mean = torch.zeros(chunk.num_seqs, dtype=gap.dtype).index_add(0, chunk.seq_ids, gap) / sizes
    ratio = mean.exp()[chunk.seq_ids]
    adv = chunk["advantages"]
    return LossTerms(-torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv), {"ratio": ratio.detach()})


of_sequences.scope = "sequence"


def of_the_batch(logprobs, entropy, chunk, *, share=0.5):
    """Only the rows of highest entropy are trained: which ones depends on all."""
    chosen = entropy >= torch.quantile(entropy.detach(), share)
    return LossTerms(-logprobs * chunk["advantages"] * chosen, {"chosen": chosen.float()})


of_the_batch.scope = "batch"
ENDS = torch.tensor([0, 5, 6, 20, 20, 37])


def problem(t=37, dtype=torch.float64, seed=0):
    hidden, weight, targets, draw = inputs(t, dtype=dtype, seed=seed, gap=2.0)
    advantages, weights = draw(t), draw(t).abs()
    advantages[::3] = 0.0
    weights[torch.arange(t) % 13 == 2] = 0.0
    old = reference.linear_logprobs(hidden, weight, targets, temperature=0.8).logprobs + 0.3 * draw(t)
    return hidden, weight, targets, {"advantages": advantages, "old_logprobs": old}, weights


LOSSES = {
    "grpo": grpo,
    "knobs bound": functools.partial(grpo, clip_low=0.1, clip_high=0.3),
    "entropy bonus": with_entropy_bonus,
    "sequences": of_sequences,
    "batch": functools.partial(of_the_batch, share=0.6),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("chunk_rows", [3, 16, 1000])
def test_value_and_gradient_against_the_twin(name, drop, chunk_rows, monkeypatch):
    """Three rows a chunk: some sequences fit, some do not and take the second form."""
    monkeypatch.setattr("csrc_triton.rows.fitting_rows", lambda *args: chunk_rows)
    hidden, weight, targets, data, weights = problem()
    results = []
    for op in (linear_grpo_loss, reference.linear_grpo_loss):
        x, w, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_(), torch.linspace(-1, 1, 101).double()
        b.requires_grad_()
        out = op(
            x, w, targets, data, LOSSES[name], weights,
            cu_seqlens=ENDS, bias=b, want_entropy=True, temperature=0.8, drop_zero_rows=drop,
        )  # fmt: skip
        out.loss.backward()
        results.append((out.loss.detach(), out.logprobs, out.entropy, x.grad, w.grad, b.grad, *out.metrics.values()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8, check_dtype=False)


def test_a_sequence_longer_than_a_chunk_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr("csrc_triton.rows.fitting_rows", lambda *args: 3)
    tell_of_long_sequences.cache_clear()
    hidden, weight, targets, data, weights = problem()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            linear_grpo_loss(hidden, weight, targets, data, of_sequences, weights, cu_seqlens=ENDS)
    assert caplog.text.count("longer than a chunk of 3 rows") == 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(9, 30))
@settings(max_examples=50, deadline=None)
def test_chunks_hold_whole_sequences(sizes, num_rows):
    seq_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    cuts = whole_sequences(torch.arange(len(seq_ids)), seq_ids, num_rows)
    assert torch.equal(torch.cat([*cuts, torch.zeros(0).long()]), torch.arange(len(seq_ids)))
    assert all(len(cut) <= num_rows for cut in cuts)
    owners = [set(seq_ids[cut].tolist()) for cut in cuts]
    assert sum(map(len, owners)) == len(set().union(*owners)) if owners else not sum(sizes)


def test_equals_the_two_ops_it_fuses():
    """prime-rl#858: the fused loss is the plain one."""
    hidden, weight, targets, data, weights = problem()
    weights = (weights != 0).double() / 31
    grads = []
    x = hidden.clone().requires_grad_()
    linear_grpo_loss(x, weight, targets, data, grpo, weights, temperature=0.8).loss.backward()
    grads.append(x.grad)
    x = hidden.clone().requires_grad_()
    logprobs = linear_logprobs(x, weight, targets, temperature=0.8).logprobs
    grpo_loss(logprobs, data["old_logprobs"], data["advantages"], weights != 0, num_tokens=31.0)[0].backward()
    torch.testing.assert_close(grads[0], x.grad)


@pytest.mark.parametrize("make", [inputs, peaked])
def test_bf16_gradients_are_within_one_rounding(make):
    hidden, weight, targets, draw = make(96, 64, 3000, torch.bfloat16)
    advantages, pairs = draw(96), []
    for op, dtype in ((linear_grpo_loss, torch.bfloat16), (reference.linear_grpo_loss, torch.float64)):
        x, w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
        data = {"advantages": advantages.to(dtype if dtype == torch.float64 else torch.float32)}
        op(x, w, targets, data, grpo, torch.ones(96, dtype=data["advantages"].dtype)).loss.backward()
        pairs.append((x.grad, w.grad.double()))
    for got, want in zip(*pairs, strict=True):
        assert relative(got, want) <= 3e-3


def test_rows_of_weight_zero_never_reach_an_exp():
    hidden, weight, targets, draw = inputs(dtype=torch.float32)
    weights = torch.ones(37)
    weights[5] = 0.0
    advantages, old = draw(37).float(), draw(37).float()
    clean = linear_grpo_loss(hidden, weight.requires_grad_(), targets, {"advantages": advantages}, grpo, weights)
    advantages[5], old[5], targets[5] = float("nan"), float("inf"), -7
    dirty = linear_grpo_loss(hidden, weight, targets, {"advantages": advantages}, grpo, weights)
    assert float(dirty.loss.detach()) == float(clean.loss.detach()) and dirty.logprobs[5] == 0
    first, second = torch.autograd.grad(clean.loss, weight)[0], torch.autograd.grad(dirty.loss, weight)[0]
    assert torch.equal(first, second)


def test_a_nan_advantage_is_not_hidden():
    hidden, weight, targets, draw = inputs(dtype=torch.float32)
    advantages = draw(37).float()
    advantages[7] = float("nan")
    x = hidden.requires_grad_()
    out = linear_grpo_loss(x, weight, targets, {"advantages": advantages}, grpo, torch.ones(37))
    out.loss.backward()
    assert bool(out.loss.isnan()) and bool(x.grad[7].isnan().all()) and bool(x.grad[8:].isfinite().all())


def test_on_policy_ratio_is_exactly_one():
    """unsloth#4502."""
    hidden, weight, targets, draw = inputs(dtype=torch.bfloat16)
    ones, data = torch.ones(37), {"advantages": draw(37).float()}
    out = linear_grpo_loss(hidden, weight, targets, data, grpo, ones)
    assert float(out.metrics["ratio_max"]) == 1.0 and float(out.metrics["clipped"]) == 0.0
    data["old_logprobs"] = linear_logprobs(hidden, weight, targets).logprobs
    again = linear_grpo_loss(hidden, weight, targets, data, grpo, ones)
    assert float(again.metrics["ratio_max"]) == 1.0 and float(again.metrics["ratio_max"]) == 1.0


@given(st.integers(0, 60), st.integers(1, 40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_zero_rows_leave_the_products_exactly(zeros, seed, entropy_wanted):
    hidden, weight, targets, draw = inputs(t=61, seed=seed)
    advantages = draw(61)
    advantages[torch.randperm(61)[:zeros]] = 0.0
    found = []
    for drop in (True, False):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        data = {"advantages": advantages}
        out = linear_grpo_loss(
            x, w, targets, data, grpo, torch.ones(61).double(), drop_zero_rows=drop, want_entropy=entropy_wanted
        )
        out.loss.backward()
        found.append((x.grad, w.grad))
        assert int(out.num_live) == 61 - zeros
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-12)


def test_loss_and_gradient_add_up_over_any_split():
    hidden, weight, targets, data, weights = problem()
    found = []
    for parts in ([slice(0, 37)], [slice(0, 11), slice(11, 12), slice(12, 37)]):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        total = 0.0
        for at in parts:
            cut = {name: value[at] for name, value in data.items()}
            loss = linear_grpo_loss(x[at], w, targets[at], cut, grpo, weights[at], temperature=0.8).loss
            loss.backward()
            total += float(loss.detach())
        found.append((torch.tensor(total), x.grad, w.grad))
    for one, three in zip(*found, strict=True):
        torch.testing.assert_close(one, three)


def test_weight_gradient_does_not_lose_digits_over_many_chunks():
    """Liger-Kernel#512 and many more: a low-precision sum drifts with the number of chunks."""
    hidden, weight, targets, draw = inputs(t=2048, h=32, v=50, dtype=torch.bfloat16)
    advantages = draw(2048).float()
    w = weight.double().requires_grad_()
    twin = reference.linear_grpo_loss
    twin(
        hidden.double(), w, targets, {"advantages": advantages.double()}, grpo, torch.ones(2048).double()
    ).loss.backward()
    errors = []
    for budget in (1, 1 << 30):
        out = torch.zeros(50, 32)
        leaf = weight.clone().requires_grad_()
        loss = linear_grpo_loss(
            hidden, leaf, targets, {"advantages": advantages}, grpo, torch.ones(2048), grad_weight_out=out,
            max_extra_bytes=budget,
        ).loss  # fmt: skip
        loss.backward()
        assert leaf.grad is None
        errors.append(relative(out, w.grad))
    assert max(errors) < 2.5e-3 and errors[0] < 1.5 * errors[1] + 1e-4


def test_a_buffer_for_the_weight_gradient_and_a_scale():
    hidden, weight, targets, data, weights = problem(dtype=torch.float32)
    weights, data = weights.float(), {name: value.float() for name, value in data.items()}
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    plain = linear_grpo_loss(x, w, targets, data, grpo, weights)
    (plain.loss * 8).backward()
    y, v = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    buffer = torch.ones_like(weight)
    out = linear_grpo_loss(y, v, targets, data, grpo, weights, grad_weight_out=buffer, loss_scale=torch.tensor(8.0))
    out.loss.backward()
    assert v.grad is None and float(out.loss.detach()) == float(plain.loss.detach())
    torch.testing.assert_close(buffer - 1, w.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(x.grad, y.grad)


def test_memory_follows_the_budget_and_not_the_tokens():
    """trl#3678: memory must grow with the chunk, not with T x V."""
    hidden = torch.zeros(1, 576, dtype=torch.bfloat16)
    for budget in (64 << 20, 160 << 20):
        rows = fitting_rows(hidden, 49152, budget)
        assert rows * 49152 * 4 <= budget and (rows + 16) * 49152 * 4 > budget - (32 << 20)


def test_gradients_only_where_asked():
    """prime-rl#3011: the gradient of a frozen head costs a product and a buffer."""
    hidden, weight, targets, draw = inputs()
    ones = torch.ones(37).double()
    for need_x, need_w in ((True, False), (False, True)):
        x, w = hidden.clone().requires_grad_(need_x), weight.clone().requires_grad_(need_w)
        linear_grpo_loss(x, w, targets, {"advantages": draw(37)}, grpo, ones).loss.backward()
        assert (x.grad is not None) == need_x and (w.grad is not None) == need_w
    with torch.no_grad():
        out = linear_grpo_loss(x, w, targets, {"advantages": draw(37)}, grpo, ones)
    assert not out.loss.requires_grad


def test_no_gradient_work_without_grad(monkeypatch):
    hidden, weight, targets, draw = inputs()
    monkeypatch.setattr("csrc_triton.rows.TorchBackend.backward", None)
    with torch.no_grad():
        data = {"advantages": draw(37)}
        linear_grpo_loss(hidden.requires_grad_(), weight, targets, data, grpo, torch.ones(37).double())


def test_backward_twice():
    hidden, weight, targets, draw = inputs()
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_grpo_loss(x, w, targets, {"advantages": draw(37)}, grpo, torch.ones(37).double()).loss
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(3 * loss, (x, w))
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 3 * b)


def test_inside_a_compiled_function_it_is_a_graph_break():
    hidden, weight, targets, draw = inputs(dtype=torch.float32)
    data, ones = {"advantages": draw(37).float()}, torch.ones(37)

    def loss(x, w):
        return 2 * linear_grpo_loss(torch.tanh(x), w, targets, data, grpo, ones).loss

    grads = []
    for fn in (loss, torch.compile(loss, backend="aot_eager")):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        fn(x, w).backward()
        grads.append((x.grad, w.grad))
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_nothing_to_train():
    hidden, weight, targets, _ = inputs()
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    for rows, weights in ((0, torch.zeros(0)), (37, torch.zeros(37))):
        out = linear_grpo_loss(x[:rows], w, targets[:rows], {"advantages": torch.ones(rows)}, grpo, weights)
        out.loss.backward()
        assert float(out.loss.detach()) == 0 and float(out.metrics["num_rows"]) == 0 and int(out.num_live) == 0
    assert not bool(x.grad.any()) and not bool(w.grad.any())


def test_what_backward_used_is_gone_after_it():
    hidden, weight, targets, draw = inputs()
    ones = torch.ones(37).double()
    loss = linear_grpo_loss(hidden.requires_grad_(), weight, targets, {"advantages": draw(37)}, grpo, ones).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autocast_leaves_the_entropy_alone():
    hidden, weight, targets, draw = inputs(dtype=torch.bfloat16)
    data, ones = {"advantages": draw(37).float()}, torch.ones(37)
    call = lambda: linear_grpo_loss(hidden, weight, targets, data, grpo, ones, want_entropy=True)  # noqa: E731
    plain = call()
    with torch.autocast("cpu", torch.bfloat16):
        cast = call()
    assert torch.equal(plain.entropy, cast.entropy) and torch.equal(plain.loss, cast.loss)


@pytest.mark.parametrize("knobs", [{"delta": 1.4}, {"beta": 0.3}, {"delta": 1.3, "beta": 0.1, "clip_low": 0.1}])
def test_grpo_is_the_vector_loss(knobs):
    _, _, _, draw = inputs()
    vectors = {name: draw(200) for name in ("old_logprobs", "advantages", "ref_logprobs")} | {
        "correction": draw(200).abs()
    }
    found = []
    for fused in (True, False):
        lp = draws(5)(200).requires_grad_()
        if fused:
            loss = grpo(lp, None, vectors, **knobs).loss.sum() / 200
        else:
            rest = {"ref_logprobs": vectors["ref_logprobs"], "correction": vectors["correction"]}
            old, adv, mask = vectors["old_logprobs"], vectors["advantages"], torch.ones(200, dtype=torch.bool)
            loss = grpo_loss(lp, old, adv, mask, **rest, num_tokens=200.0, **knobs)[0]
        loss.backward()
        found.append((loss.detach().double(), lp.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def scalar_loss(logprobs, entropy, chunk):
    return LossTerms(-logprobs.sum())


def unknown_scope(logprobs, entropy, chunk):
    return LossTerms(-logprobs)


unknown_scope.scope = "row"
BAD = [
    ({"token_loss": of_sequences}, "needs cu_seqlens"),
    ({"token_loss": of_sequences, "cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must rise from 0 to T = 4"),
    ({"token_loss": unknown_scope}, "token_loss.scope must be one of token, sequence, batch; got 'row'"),
    ({"grad_weight_out": torch.zeros(9, 3).bfloat16()}, "grad_weight_out must be fp32 (9, 3)"),
    ({"token_data": {"advantages": torch.zeros(3)}}, "advantages must have 4 rows"),
    ({"weights": torch.zeros(5)}, "weights must have 4 rows"),
    ({"weights": torch.ones(4, 1)}, "weights must be (T,) = (4,), got (4, 1)"),
    (
        {"token_data": {"advantages": torch.zeros(4, 1)}},
        "token_loss must return a loss of (4,), one number a row, got (4, 4)",
    ),
    ({"token_loss": scalar_loss}, "token_loss must return a loss of (4,), one number a row, got ()"),
    ({"targets": torch.full((4,), -100)}, "targets must be in [0, 9), got -100"),
    ({"token_loss": of_sequences, "cu_seqlens": torch.zeros(0).long()}, "cu_seqlens must be (N+1,), got (0,)"),
    ({"sparse_tolerance": 0.0}, "sparse_tolerance must be > 0 and finite, got 0.0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_are_named(change, message):
    call = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(9, 3),
        "targets": torch.zeros(4, dtype=torch.int64),
        "token_data": {"advantages": torch.zeros(4)},
        "token_loss": grpo,
        "weights": torch.ones(4),
    } | change
    with pytest.raises(ValueError) as error:
        linear_grpo_loss(**call)
    assert message in str(error.value)
