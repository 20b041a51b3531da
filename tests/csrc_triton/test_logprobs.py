"""linear_logprobs: fp64 on the same values is the truth; values, gradients, every option, every way to call it."""

import functools
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import csrc_triton
from csrc_triton import linear_logprobs, reference
from csrc_triton.rows import SLAB_NUMBERS
from tests.csrc_triton.inputs import inputs, peaked, relative


@pytest.mark.parametrize("name", ["linear_logprobs", "linear_grpo_loss", "grpo_loss"])
def test_op_and_twin_have_one_signature(name):
    op, twin = getattr(csrc_triton, name), getattr(reference, name)
    assert list(inspect.signature(op).parameters.values()) == list(inspect.signature(twin).parameters.values())


KEPT = (torch.arange(38) * 2, torch.arange(74) % 101)
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": torch.linspace(0.5, 1.6, 37, dtype=torch.float64)},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 3.0, "temperature": 1.3, "logit_scale": 1.4},
    "kept": {"kept": KEPT},
    "kept entropy": {"kept": KEPT, "entropy_over": "kept", "softcap": 3.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_against_the_twin(option, with_bias):
    hidden, weight, targets, draw = inputs()
    targets[[3, 20]] = -100
    bias = draw(101) if with_bias else None
    upstream = [draw(37), draw(37), draw(37)]
    grads = []
    for op in (linear_logprobs, reference.linear_logprobs):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        call = functools.partial(op, bias=leaves[2] if with_bias else None, max_extra_bytes=1, **OPTIONS[option])
        out = call(leaves[0], leaves[1], targets, want_entropy=True, want_sum_sq=True)
        loss = sum((u * x).sum() for u, x in zip(upstream, (out.logprobs, out.entropy, out.sum_sq), strict=True))
        grads.append((out, torch.autograd.grad(loss, leaves)))
    for ours, theirs in zip(grads[0][0], grads[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)
    for ours, theirs in zip(grads[0][1], grads[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("only", ["logprobs", "entropy", "sum_sq"])
def test_each_output_alone_has_its_gradient(only):
    """A missing upstream gradient is not the same as one of zero."""
    hidden, weight, targets, draw = inputs()
    upstream, grads = draw(37), []
    for op in (linear_logprobs, reference.linear_logprobs):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = op(x, w, targets, want_entropy=True, want_sum_sq=True, temperature=0.7)
        grads.append(torch.autograd.grad((getattr(out, only) * upstream).sum(), (x, w)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def test_gradcheck():
    hidden, weight, targets, _ = inputs(t=5, h=3, v=7)
    call = lambda x, w: linear_logprobs(x, w, targets, want_entropy=True, want_sum_sq=True, softcap=5.0)  # noqa: E731
    pick = lambda x, w: [call(x, w)[i] for i in (0, 1, 3)]  # noqa: E731
    assert torch.autograd.gradcheck(pick, (hidden.requires_grad_(), weight.requires_grad_()))


def ideal_gradients(hidden, weight, targets, upstream):
    """What rounding alone costs: fp64 d(loss)/d(logits) rounded once, exact products, results rounded once."""
    x, w = hidden.double(), weight.double()
    p = torch.softmax(x @ w.T, -1)
    dz = -upstream[:, None] * p
    dz[torch.arange(len(targets)), targets] += upstream
    dz16 = dz.to(hidden.dtype).double()
    truth, ideal = (dz @ w, dz.T @ x), (dz16 @ w, dz16.T @ x)
    return truth, [relative(got.to(hidden.dtype), want) for got, want in zip(ideal, truth, strict=True)]


SHAPES = [(1, 8, 127), (7, 64, 2), (127, 80, 1000), (129, 100, 4097), (64, 576, 5000)]


@pytest.mark.parametrize("make", [inputs, peaked])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_inputs_lose_nothing_but_one_rounding(shape, make):
    t, h, v = shape
    hidden, weight, targets, draw = make(t, h, v, torch.bfloat16)
    truth = reference.linear_logprobs(hidden.double(), weight.double(), targets, want_entropy=True)
    plain = reference.linear_logprobs(hidden.float(), weight.float(), targets, want_entropy=True)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = linear_logprobs(x, w, targets, want_entropy=True)
    largest = float((hidden.double() @ weight.double().T).abs().max())
    error = float((ours.logprobs - truth.logprobs).detach().abs().max())
    assert error <= 1e-5 + 5e-7 * largest
    assert error <= 2 * float((plain.logprobs - truth.logprobs).abs().max()) + 1e-6
    assert float((ours.entropy - truth.entropy).detach().abs().max()) <= 2e-5 + 5e-7 * largest
    assert float(ours.logprobs.detach().max()) <= 0
    upstream = draw(t)
    (ours.logprobs * upstream).sum().backward()
    wanted, ideal = ideal_gradients(hidden, weight, targets, upstream)
    for got, want, floor in zip((x.grad, w.grad), wanted, ideal, strict=True):
        if float(want.norm()) > 1e-9:
            assert relative(got, want) <= min(3e-3, 1.2 * floor)
    if v > 2:
        rows = wanted[0].norm(dim=-1)
        told = rows > 1e-3 * rows.median()
        off = (x.grad.double() - wanted[0]).norm(dim=-1)[told] / rows[told]
        assert float((off < 0.02).double().mean()) >= 0.99


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_a_common_offset_changes_nothing(offset):
    """SkyRL#2141, pytorch#195829."""
    hidden, weight, targets, _ = inputs(dtype=torch.float32)
    bias = torch.full((101,), offset)
    near = linear_logprobs(hidden, weight, targets, want_entropy=True)
    far = linear_logprobs(hidden, weight, targets, bias=bias, want_entropy=True)
    torch.testing.assert_close(near.logprobs, far.logprobs, atol=1e-5 + 5e-7 * 220, rtol=0)
    torch.testing.assert_close(near.entropy, far.entropy, atol=2e-5 + 5e-7 * 220, rtol=0)


def test_banned_ids_give_finite_values_and_get_no_gradient():
    """trl#7221: a bias of -inf."""
    hidden, weight, targets, _ = inputs(dtype=torch.float32)
    bias = torch.zeros(101)
    bias[90:] = float("-inf")
    targets %= 90
    w = weight.requires_grad_()
    out = linear_logprobs(hidden, w, targets, bias=bias, want_entropy=True, want_sum_sq=True)
    (out.logprobs + out.entropy + out.sum_sq).sum().backward()
    assert all(bool(x.isfinite().all()) for x in out) and bool(w.grad.isfinite().all())
    assert bool((w.grad[90:] == 0).all())


def call_all(hidden, weight, targets, **options):
    out = linear_logprobs(hidden, weight, targets, want_entropy=True, want_sum_sq=True, **options)
    return torch.stack([x for x in out if x is not None])


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(2, 80))
@settings(max_examples=25, deadline=None)
def test_order_and_company_do_not_matter(seed, t, v):
    hidden, weight, targets, _ = inputs(t, 8, v, seed=seed)
    whole = call_all(hidden, weight, targets)
    rows, ids = torch.randperm(t), torch.randperm(v)
    torch.testing.assert_close(call_all(hidden[rows], weight, targets[rows]), whole[:, rows])
    torch.testing.assert_close(call_all(hidden, weight[ids], torch.argsort(ids)[targets]), whole)
    half = t // 2
    parts = [call_all(hidden[:half], weight, targets[:half]), call_all(hidden[half:], weight, targets[half:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    tau = torch.where(torch.arange(t) % 2 == 0, 0.5, 1.5).double()
    mixed = call_all(hidden, weight, targets, temperature=tau)
    torch.testing.assert_close(mixed[:, ::2], call_all(hidden[::2], weight, targets[::2], temperature=0.5))
    everything = (torch.arange(t + 1) * v, torch.arange(v).repeat(t))
    torch.testing.assert_close(call_all(hidden, weight, targets, kept=everything, entropy_over="kept"), whole)


def test_temperature_as_a_number_and_as_a_vector_agree_bit_for_bit():
    hidden, weight, targets, _ = inputs(dtype=torch.float32)
    number = call_all(hidden, weight, targets, temperature=0.7)
    assert torch.equal(number, call_all(hidden, weight, targets, temperature=torch.full((37,), 0.7)))


def test_asking_for_more_leaves_log_probabilities_and_repeats_are_equal():
    hidden, weight, targets, _ = inputs(dtype=torch.bfloat16)
    alone, again = (linear_logprobs(hidden, weight, targets).logprobs for _ in range(2))
    more = linear_logprobs(hidden, weight, targets, want_entropy=True, want_sum_sq=True).logprobs
    assert torch.equal(alone, again) and torch.equal(alone, more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_and_slabs_do_not_show(dtype):
    """More rows than a chunk, more of W than a slab."""
    v = SLAB_NUMBERS // 2048 + 77
    hidden, weight, targets, _ = inputs(100, 2048, v, dtype)
    found = []
    for budget in (1, None):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        linear_logprobs(x, w, targets, max_extra_bytes=budget).logprobs.sum().backward()
        found.append((x.grad, w.grad))
    for small, large in zip(*found, strict=True):
        assert relative(small.double(), large.double()) < (1e-12 if dtype == torch.float64 else 4e-3)


def test_rows_of_another_stride_and_int32_targets():
    hidden, weight, targets, _ = inputs(t=40)
    wide = torch.zeros(40, 60, dtype=torch.float64)
    wide[:, 10:34] = hidden
    a = call_all(wide[:, 10:34], weight, targets.int())
    assert torch.equal(a, call_all(hidden, weight, targets))


def test_ignored_rows_give_zero_and_take_part_in_nothing():
    """Liger-Kernel#968, trl#3681."""
    hidden, weight, targets, _ = inputs()
    targets[::3] = -100
    hidden[::3] = float("nan")
    x = hidden.clone().requires_grad_()
    w = weight.clone().requires_grad_()
    out = linear_logprobs(x, w, targets, want_entropy=True, want_sum_sq=True)
    (out.logprobs * 2 + out.entropy + out.sum_sq).sum().backward()
    assert all(bool((value[::3] == 0).all()) for value in out)
    assert bool((x.grad[::3] == 0).all()) and bool(x.grad[1::3].ne(0).any()) and bool(w.grad.isfinite().all())


def test_a_nan_is_never_hidden():
    hidden, weight, targets, _ = inputs(dtype=torch.float32)
    hidden[4, 2] = float("nan")
    out = linear_logprobs(hidden, weight, targets, want_entropy=True)
    assert bool(out.logprobs[4].isnan()) and bool(out.entropy[4].isnan())
    assert bool(out.logprobs[5:].isfinite().all())


def test_a_capped_target_far_below_the_rest_keeps_its_gradient():
    """Its probability underflows, its slope does not."""
    hidden, targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 0])
    weight = torch.tensor([[70.0, 1.0], [-70.0, 2.0], [0.0, 3.0]])
    grads = []
    for op, dtype in ((linear_logprobs, torch.float32), (reference.linear_logprobs, torch.float64)):
        x, w = (leaf.detach().clone().to(dtype).requires_grad_() for leaf in (hidden, weight))
        op(x, w, targets, softcap=100.0).logprobs.sum().backward()
        grads.append((x.grad.double(), w.grad.double()))
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("gap", [8.0, 11.0, 14.0])
def test_an_entropy_gradient_costs_a_sure_target_no_digits(gap):
    """1 - p of the target comes in one piece, whatever else has a gradient."""
    hidden, weight, grads = torch.tensor([[1.0]]), torch.tensor([[gap], [0.0], [-1.0]]), []
    for share in (None, 0.0):
        x = hidden.clone().requires_grad_()
        out = linear_logprobs(x, weight, torch.tensor([0]), want_entropy=True)
        (out.logprobs if share is None else out.logprobs + share * out.entropy).sum().backward()
        grads.append(float(x.grad))
    assert abs(grads[0] / grads[1] - 1) < 1e-5


def test_no_tokens():
    hidden, weight, targets, _ = inputs(t=0)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    out = linear_logprobs(x, w, targets, want_entropy=True)
    assert out.entropy.shape == (0,) and out.sum_sq is None
    out.logprobs.sum().backward()
    assert x.grad.shape == (0, 24) and not bool(w.grad.any())


BAD = [
    ({"hidden": torch.zeros(4, 9)}, "looks like logits"),
    ({"hidden": torch.zeros(2, 2, 3)}, "flatten batch and sequence"),
    ({"weight": torch.zeros(0, 3)}, "gather a sharded head"),
    ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must have 4 rows"),
    ({"targets": torch.full((4,), 9)}, "targets must be in [0, 9) or -100, got 9"),
    ({"targets": torch.zeros(4)}, "targets must be (T,) int32 or int64"),
    ({"temperature": 0.0}, "temperature must be > 0 and finite, got 0.0"),
    ({"temperature": float("nan")}, "temperature must be > 0 and finite, got nan"),
    ({"temperature": torch.tensor([1.0, 1, -1, 1])}, "got -1.0 as its smallest"),
    ({"softcap": -1.0}, "softcap must be > 0 and finite, got -1.0"),
    ({"weight": torch.zeros(9, 3).double()}, "one float type"),
    ({"hidden": torch.zeros(4, 3).int(), "weight": torch.zeros(9, 3).int()}, "one float type"),
    ({"bias": torch.zeros(3)}, "bias must be (V,) = (9,) on cpu, got (3,) on cpu"),
    ({"temperature": torch.ones(4, 1)}, "temperature must be (T,) = (4,), got (4, 1)"),
    ({"backend": "cudnn"}, "backend must be one of auto, cublas, triton, torch; got 'cudnn'"),
    ({"backend": "cublas"}, "needs CUDA tensors, got cpu"),
    ({"entropy_over": "all"}, "entropy_over must be 'vocab' or 'kept', got 'all'"),
    ({"kept": (torch.zeros(3).long(), torch.zeros(0).long())}, "kept[0] must be (T+1,) = (5,), got (3,)"),
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
