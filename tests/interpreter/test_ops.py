"""The public ops on the Triton backends, through the interpreter: what the kernels give is what the ops promise."""

import functools

import pytest
import torch

from csrc_triton import LossTerms, grpo, linear_grpo_loss, linear_logprobs, reference
from tests.csrc_triton.inputs import peaked, relative

BACKENDS = ["cublas", "triton"]


def problem(t=19, h=24, v=130):
    hidden, weight, targets, draw = peaked(t, h, v, torch.float32)
    return hidden, weight, targets, draw


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "logit_scale": 1.3}, {"softcap": 5.0}, {"softcap": 5.0, "logit_scale": -1.2}],
    ids=["plain", "scaled", "softcap", "softcap and a negative scale"],
)
def test_log_probabilities(backend, options):
    hidden, weight, targets, draw = problem()
    targets[4] = -100
    bias, upstream, results = draw(130), [draw(19) for _ in range(3)], []
    for op, dtype in ((functools.partial(linear_logprobs, backend=backend), torch.float32),
                      (reference.linear_logprobs, torch.float64)):  # fmt: skip
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        out = op(leaves[0], leaves[1], targets, bias=leaves[2], want_entropy=True, want_sum_sq=True, **options)
        values = (out.logprobs, out.entropy, out.sum_sq)
        sum((u.to(dtype) * x).sum() for u, x in zip(upstream, values, strict=True)).backward()
        results.append((*[x.detach().double() for x in out], *(leaf.grad for leaf in leaves)))
    largest = float((hidden.double() @ weight.double().T).abs().max())
    for ours, truth, limit in zip(results[0][:4], results[1][:4], (1e-5, 2e-5, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(ours, truth, atol=limit + 5e-7 * largest, rtol=0)
    for ours, truth in zip(results[0][4:], results[1][4:], strict=True):
        assert relative(ours, truth) < 1e-5


def with_entropy_bonus(logprobs, entropy, chunk):
    return LossTerms(grpo(logprobs, entropy, chunk).loss - 0.3 * entropy)


def of_the_batch(logprobs, entropy, chunk):
    chosen = entropy >= entropy.detach().median()
    return LossTerms(-logprobs * chunk["advantages"] * chosen)


of_the_batch.scope = "batch"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", [grpo, with_entropy_bonus, of_the_batch])
def test_the_fused_loss(backend, loss):
    hidden, weight, targets, draw = problem()
    advantages, weights = draw(19), draw(19).abs()
    advantages[::3], weights[5] = 0.0, 0.0
    old = reference.linear_logprobs(hidden.double(), weight.double(), targets).logprobs + 0.3 * draw(19)
    results = []
    for op, dtype in ((functools.partial(linear_grpo_loss, backend=backend), torch.float32),
                      (reference.linear_grpo_loss, torch.float64)):  # fmt: skip
        x, w = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
        data = {"advantages": advantages.to(dtype), "old_logprobs": old.to(dtype)}
        out = op(x, w, targets, data, loss, weights.to(dtype), want_entropy=True, temperature=1.1)
        out.loss.backward()
        results.append((out.loss.detach(), x.grad, w.grad))
    torch.testing.assert_close(results[0][0].double(), results[1][0], atol=1e-4, rtol=1e-5)
    for ours, truth in zip(results[0][1:], results[1][1:], strict=True):
        assert relative(ours, truth) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_and_a_weight_of_any_stride(backend):
    hidden, weight, targets, draw = problem()
    bias = draw(130, 3).float()[:, 1]
    call = functools.partial(linear_logprobs, want_entropy=True, backend=backend)
    straight = call(hidden, weight, targets, bias=bias.contiguous())
    for other in (call(hidden, weight, targets, bias=bias), call(hidden, weight.T.contiguous().T, targets, bias=bias)):
        assert torch.equal(straight.logprobs, other.logprobs) and torch.equal(straight.entropy, other.entropy)
    flat = call(hidden, weight, targets, bias=torch.tensor(0.5).expand(130))
    torch.testing.assert_close(flat.logprobs, call(hidden, weight, targets).logprobs, atol=1e-5, rtol=1e-5)


def test_kept_sets_with_a_bias_and_a_weight_of_any_stride(monkeypatch):
    monkeypatch.setattr("csrc_triton.kept.use_kernels", lambda hidden, backend: True)
    hidden, weight, targets, draw = problem()
    bias, kept = draw(130, 3).float()[:, 1], (torch.arange(20) * 4, torch.arange(76) % 130)
    call = functools.partial(linear_logprobs, kept=kept, entropy_over="kept", want_entropy=True)
    found = call(hidden, weight.T.contiguous().T, targets, bias=bias)
    straight = call(hidden, weight, targets, bias=bias.contiguous())
    assert torch.equal(found.logprobs, straight.logprobs) and torch.equal(found.entropy, straight.entropy)
