"""grpo_loss against its twin in fp64: values, gradients, counters, edges, and what must never leak in or be hidden."""

import pytest
import torch

from csrc_triton import grpo_loss
from csrc_triton.grpo_loss import COUNTERS
from tests.csrc_triton.policy import EDGE_KNOBS, KNOBS, counted, edges, twin, vectors


def run(rows, knobs, num_tokens):
    leaf = rows[0].clone().requires_grad_()
    loss, counters = grpo_loss(leaf, *rows[1:], num_tokens=num_tokens, **knobs)
    loss.backward()
    return loss.detach(), leaf.grad, counters


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("t", [1, 7, 64])
def test_value_gradient_and_counters(name, t):
    rows, knobs = vectors(t, KNOBS[name])
    loss, grad, counters = run(rows, knobs, 33.0)
    wanted = twin(rows, knobs, 33.0)
    torch.testing.assert_close(loss, wanted[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grad, wanted[1], atol=1e-12, rtol=1e-12)
    for key, value in counted(rows, knobs).items():
        assert float(counters[key]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), key
    assert tuple(counters) == COUNTERS
    assert all(value.dtype == torch.float32 and value.shape == () for value in counters.values())


@pytest.mark.parametrize("knobs", EDGE_KNOBS)
def test_ties_take_the_gradient_of_autograd(knobs):
    rows = edges(torch.float64)
    loss, grad, _ = run(rows, knobs, 1.0)
    wanted = twin(rows, knobs, 1.0)
    assert torch.equal(grad, wanted[1])
    torch.testing.assert_close(loss, wanted[0])


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_a_reference_far_away_has_no_gradient(kl):
    lp = torch.zeros(6, dtype=torch.float64)
    ref = torch.tensor([0.0, 20.0, -20.0, 20.001, -100.0, 0.5], dtype=torch.float64)
    rows = (lp, lp.clone(), torch.zeros_like(lp), torch.ones(6, dtype=torch.bool))
    knobs = {"ref_logprobs": ref, "beta": 0.3, "kl": kl}
    loss, grad, _ = run(rows, knobs, 2.0)
    wanted = twin(rows, knobs, 2.0)
    torch.testing.assert_close(grad, wanted[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, wanted[0])
    assert bool((grad[3:5] == 0).all())


def test_a_token_far_below_is_counted_by_its_clamped_ratio():
    gap = torch.tensor([-100.0, -0.125, -30.0], dtype=torch.float64)
    rows = (gap, torch.zeros_like(gap), torch.tensor([1.0, -1.0, -2.0], dtype=torch.float64), torch.ones(3) > 0)
    counters = run(rows, {}, 1.0)[2]
    for key, value in counted(rows, {}).items():
        assert float(counters[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key


def test_on_policy_the_gradient_is_exact():
    (lp, _, adv, mask), knobs = vectors(64, {"correction": True})
    lp, adv, w = lp.float(), adv.float(), knobs["correction"].float()
    _, grad, counters = run((lp, lp, adv, mask), {"correction": w}, 48.0)
    assert torch.equal(grad, torch.where(mask, -w * adv * (torch.ones(()) / 48.0), torch.zeros(())))
    assert float(counters["ratio_max"]) == 1.0 and float(counters["ess"]) == 1.0


def test_the_correction_is_of_the_policy_term_alone():
    rows, knobs = vectors(9, {"kl": "k3", "beta": 0.5})
    zero = torch.zeros(9, dtype=torch.float64)
    loss, grad, _ = run(rows, {**knobs, "correction": zero}, 1.0)
    only_kl, kl_grad, _ = run((rows[0], rows[1], zero, rows[3]), knobs, 1.0)
    assert loss == only_kl and torch.equal(grad, kl_grad)


@pytest.mark.parametrize("num_tokens", [0.0, torch.tensor(0), torch.tensor(5.0)])
@pytest.mark.parametrize("t", [0, 5])
def test_nothing_to_train_on(t, num_tokens):
    rows, knobs = vectors(t, KNOBS["all"])
    loss, grad, counters = run((*rows[:3], torch.zeros(t, dtype=torch.bool)), knobs, num_tokens)
    assert float(loss) == 0.0 and torch.equal(grad, torch.zeros_like(grad))
    assert all(float(value) == 0.0 for value in counters.values())


def test_masked_rows_are_not_read():
    rows, knobs = vectors(32, KNOBS["all"])
    clean = run(rows, knobs, 3.0)
    out = ~rows[3]
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300] * 8, dtype=torch.float64)
    dirty = [torch.where(out, garbage, x) for x in rows[:3]]
    knobs = {k: torch.where(out, garbage, v) if isinstance(v, torch.Tensor) else v for k, v in knobs.items()}
    loss, grad, counters = run((*dirty, rows[3]), knobs, 3.0)
    assert loss == clean[0] and torch.equal(grad, clean[1])
    assert all(torch.equal(counters[key], clean[2][key]) for key in COUNTERS)


@pytest.mark.parametrize("where", ["logprobs", "old", "advantages", "correction", "ref_logprobs"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_nan_is_not_hidden(where, kl):
    rows, knobs = vectors(12, {**KNOBS["all"], "kl": kl})
    named = dict(zip(("logprobs", "old", "advantages", "mask"), rows, strict=True))
    {**named, **knobs}[where][4] = float("nan")  # token 4 is live
    loss, grad, counters = run(tuple(named.values()), knobs, 1.0)
    assert loss.isnan() and grad[4].isnan() and float(counters["nonfinite"]) == 1.0
    assert int(grad.isnan().sum()) == 1


def test_a_reference_without_beta_is_counted_only():
    rows, knobs = vectors(16, {"beta": 0.1})
    knobs["beta"] = 0.0
    loss, grad, counters = run(rows, knobs, 2.0)
    plain = run(rows, {}, 2.0)
    assert loss == plain[0] and torch.equal(grad, plain[1])
    assert float(counters["kl_ref"]) == pytest.approx(counted(rows, knobs)["kl_ref"], rel=1e-6)


def test_tokens_of_two_calls_add_up():
    rows, knobs = vectors(40, KNOBS["all"])
    whole = run(rows, knobs, 7.0)
    cut = lambda at: ([x[at] for x in rows], {k: v[at] if isinstance(v, torch.Tensor) else v for k, v in knobs.items()})  # noqa: E731
    parts = [run(*cut(at), 7.0) for at in (slice(0, 13), slice(13, 40))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


def test_types_and_shapes_follow_logprobs():
    rows, _ = vectors(24, {})
    low = tuple(x.bfloat16() if x.is_floating_point() else x.float() for x in rows)  # a mask of floats is one too
    leaf = low[0].requires_grad_()
    loss, counters = grpo_loss(leaf, *low[1:], num_tokens=torch.tensor(4))
    loss.backward()
    assert loss.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    square = [x.detach().float().reshape(4, 6) for x in low]
    grads = torch.autograd.grad(grpo_loss(square[0].requires_grad_(), *square[1:], num_tokens=4.0)[0], square[0])[0]
    torch.testing.assert_close(grads.flatten().bfloat16(), leaf.grad)
    assert not counters["ratio_sum"].requires_grad


def test_second_derivatives_are_refused():
    rows, _ = vectors(8, {})
    leaf = rows[0].requires_grad_()
    loss, _ = grpo_loss(leaf, *rows[1:], num_tokens=1.0)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="grpo_loss_backward"):
        grad.sum().backward()


def test_a_second_backward_gives_the_same():
    rows, _ = vectors(8, {})
    leaf = rows[0].requires_grad_()
    loss, _ = grpo_loss(leaf, *rows[1:], num_tokens=1.0)
    first, second = (torch.autograd.grad(3 * loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("num_tokens", [5.0, torch.tensor(5.0, dtype=torch.float64)])
def test_torch_compile_without_a_graph_break(name, num_tokens):
    rows, knobs = vectors(16, KNOBS[name])
    compiled = torch.compile(grpo_loss, fullgraph=True, backend="aot_eager")
    leaf = rows[0].clone().requires_grad_()
    loss, counters = compiled(leaf, *rows[1:], num_tokens=num_tokens, **knobs)
    loss.backward()
    wanted = run(rows, knobs, num_tokens)
    assert torch.equal(loss.detach(), wanted[0]) and torch.equal(leaf.grad, wanted[1])
    assert torch.equal(counters["ratio_sum"], wanted[2]["ratio_sum"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_keeps_the_promises_of_its_schema(dtype):
    rows, _ = vectors(8, {})
    rows = tuple(x.to(dtype) if x.is_floating_point() else x for x in rows)
    args = (rows[0].requires_grad_(), *rows[1:], None, rows[2].abs(), 0.2, 0.2, 1.5, 0.0, "k3")
    torch.library.opcheck(torch.ops.e3fast.grpo_loss, args)
    torch.library.opcheck(torch.ops.e3fast.grpo_loss_backward, (torch.ones(()), torch.ones(8)))


BAD = [
    ({"old_logprobs": torch.zeros(3)}, "old_logprobs must be (4,) like logprobs, got (3,)"),
    ({"correction": torch.zeros(4, 1)}, "correction must be (4,) like logprobs, got (4, 1)"),
    ({"kl": "k4"}, "kl must be one of k1, k2, k3; got 'k4'"),
    ({"beta": 0.1}, "beta = 0.1 needs ref_logprobs"),
    ({"num_tokens": -5.0}, "num_tokens must be >= 0 and finite, got -5.0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_are_named(change, message):
    zeros = {name: torch.zeros(4) for name in ("logprobs", "old_logprobs", "advantages", "loss_mask")}
    with pytest.raises(ValueError) as error:
        grpo_loss(**({"num_tokens": 1.0} | zeros | change))
    assert message in str(error.value)
