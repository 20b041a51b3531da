"""On a CUDA device: bf16 operands through tensor cores, TMA and cuBLAS, sizes past int32, and the bitwise contract."""

import functools

import pytest
import torch

from csrc_triton import grpo, grpo_loss, linear_grpo_loss, linear_logprobs, reference
from tests.csrc_triton.inputs import inputs, peaked, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKENDS = ["cublas", "triton", "torch"]
SHAPES = [(1, 64, 127), (7, 80, 1000), (127, 100, 4097), (129, 576, 49152), (300, 1024, 20011)]


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [inputs, peaked])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 30.0}], ids=["plain", "softcap"])
def test_log_probabilities_against_fp64(backend, shape, make, options):
    hidden, weight, targets, draw = make(*shape, torch.bfloat16)
    upstream = draw(shape[0]).cuda()
    hidden, weight, targets = on_gpu(hidden, weight, targets)
    results = []
    for op, dtype in ((functools.partial(linear_logprobs, backend=backend), torch.bfloat16),
                      (reference.linear_logprobs, torch.float64)):  # fmt: skip
        x, w = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
        out = op(x, w, targets, want_entropy=True, **options)
        ((out.logprobs + 0.1 * out.entropy).double() * upstream).sum().backward()
        results.append((out.logprobs.detach(), out.entropy.detach(), x.grad, w.grad))
    largest = float((hidden.double() @ weight.double().T).abs().max()) / options.get("temperature", 1.0)
    ours, truth = results
    assert float((ours[0] - truth[0]).abs().max()) <= 1e-5 + 5e-7 * largest
    assert float((ours[1] - truth[1]).abs().max()) <= 2e-5 + 5e-7 * largest
    for got, want in zip(ours[2:], truth[2:], strict=True):
        assert relative(got, want) <= 3e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(129, 576, 49152), (1000, 1024, 20011)])
def test_fused_loss_against_fp64(backend, dropped, shape):
    hidden, weight, targets, draw = peaked(*shape, torch.bfloat16)
    advantages = draw(shape[0])
    advantages[torch.randperm(shape[0])[: int(dropped * shape[0])]] = 0
    hidden, weight, targets, advantages = on_gpu(hidden, weight, targets, advantages)
    ones, results = torch.ones(shape[0], device="cuda"), []
    for op, dtype in ((functools.partial(linear_grpo_loss, backend=backend), torch.bfloat16),
                      (reference.linear_grpo_loss, torch.float64)):  # fmt: skip
        x, w = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
        data = {"advantages": advantages.to(torch.float32 if dtype == torch.bfloat16 else dtype)}
        out = op(x, w, targets, data, grpo, ones.to(data["advantages"].dtype))
        out.loss.backward()
        results.append((x.grad, w.grad))
        assert int(out.num_live) == int((advantages != 0).sum()) or dtype == torch.float64
    for got, want in zip(*results, strict=True):
        assert relative(got, want) <= 3e-3


def test_a_row_does_not_depend_on_its_company():
    hidden, weight, targets, _ = peaked(700, 576, 49152, torch.bfloat16)
    hidden, weight, targets = on_gpu(hidden, weight, targets)
    call = lambda x, y: linear_logprobs(x, weight, y, want_entropy=True, backend="triton")[:2]  # noqa: E731
    whole, order = call(hidden, targets), torch.randperm(700, device="cuda")
    for n in (1, 127, 128, 500):
        for part, all_rows in zip(call(hidden[:n], targets[:n]), whole, strict=True):
            assert torch.equal(part, all_rows[:n])
    for part, all_rows in zip(call(hidden[order], targets[order]), whole, strict=True):
        assert torch.equal(part, all_rows[order])


@pytest.mark.parametrize("backend", ["cublas", "triton"])  # index_add of "torch" is not deterministic on CUDA
def test_the_same_bits_each_time(backend):
    hidden, weight, targets, draw = peaked(300, 576, 49152, torch.bfloat16)
    hidden, weight, targets, advantages = on_gpu(hidden, weight, targets, draw(300).float())
    found = []
    for _ in range(2):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        ones = torch.ones(300, device="cuda")
        linear_grpo_loss(x, w, targets, {"advantages": advantages}, grpo, ones, backend=backend).loss.backward()
        found.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["cublas", "triton"])
def test_more_rows_and_more_logits_than_int32_counts(backend):
    """Liger-Kernel#1294, fla#1080: T = 70,000, C x V past 2^31; the last rows are as right as the first."""
    t, h, v = 70_000, 64, 300_032  # chunks of 7,792 rows; 8,192 of 262,144 would end at 2^31 - 1, which int32 holds
    hidden, weight = torch.randn(t, h, device="cuda"), torch.randn(v, h, device="cuda") * 0.3
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    targets = torch.randint(0, v, (t,), device="cuda")
    advantages = torch.zeros(t, device="cuda")
    advantages[-9000:] = 1.0
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ones, budget = torch.ones(t, device="cuda"), 60 << 30
    options = {"backend": backend, "max_extra_bytes": budget}
    linear_grpo_loss(x, w, targets, {"advantages": advantages}, grpo, ones, **options).loss.backward()
    last = hidden[-64:].double().requires_grad_()
    truth = reference.linear_logprobs(last, weight.double(), targets[-64:]).logprobs
    truth.sum().backward()
    assert relative(x.grad[-64:], -last.grad) < 3e-3
    ours = linear_logprobs(hidden, weight, targets, **options).logprobs[-64:]
    assert float((ours - truth.detach()).abs().max()) < 1e-4


def test_vector_loss_against_its_twin():
    _, _, _, draw = inputs()
    lp, old, ref, adv = (draw(5000).cuda() for _ in range(4))
    mask = torch.arange(5000, device="cuda") % 4 != 0
    knobs = dict(ref_logprobs=ref, correction=draw(5000).abs().cuda(), delta=1.5, beta=0.1, num_tokens=3750.0)
    cast = lambda x, dtype: x.to(dtype) if isinstance(x, torch.Tensor) else x  # noqa: E731
    x = lp.float().requires_grad_()
    loss, counters = grpo_loss(
        x, old.float(), adv.float(), mask, **{k: cast(v, torch.float32) for k, v in knobs.items()}
    )
    loss.backward()
    y = lp.cpu().requires_grad_()
    knobs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in knobs.items()}
    truth, _ = grpo_loss(y, old.cpu(), adv.cpu(), mask.cpu(), **knobs)
    truth.backward()
    assert abs(float(loss.detach()) - float(truth.detach())) < 1e-4 and int(counters["tokens"]) == 3750
    assert relative(x.grad.cpu(), y.grad) < 1e-5


def test_kept_sets_against_the_twin():
    hidden, weight, targets, draw = peaked(200, 576, 3000, torch.bfloat16)
    kept = (torch.arange(201) * 9, torch.randint(0, 3000, (1800,)))
    upstream, results = draw(200).cuda(), []
    hidden, weight, targets, *kept = on_gpu(hidden, weight, targets, *kept)
    for op, dtype in ((linear_logprobs, torch.bfloat16), (reference.linear_logprobs, torch.float64)):
        x, w = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
        out = op(x, w, targets, kept=tuple(kept), entropy_over="kept", want_entropy=True)
        ((out.logprobs + 0.2 * out.entropy).double() * upstream).sum().backward()
        results.append((out.logprobs.detach().double(), x.grad, w.grad))
    assert float((results[0][0] - results[1][0]).abs().max()) < 1e-4
    for got, want in zip(results[0][1:], results[1][1:], strict=True):
        assert relative(got, want) <= 3e-3
