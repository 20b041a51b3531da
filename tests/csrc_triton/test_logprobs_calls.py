"""linear_logprobs, every way to call it: grad modes, autocast, threads, torch.compile, what is saved, what is read."""

import threading

import pytest
import torch

from csrc_triton import linear_logprobs, reference
from csrc_triton.rows import CACHED_ROWS
from tests.csrc_triton.inputs import inputs, relative


@pytest.mark.parametrize("need", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1) if x + w + b])
def test_gradients_only_where_asked(need):
    hidden, weight, targets, draw = inputs()
    leaves = [x.requires_grad_(bool(wanted)) for x, wanted in zip((hidden, weight, draw(101)), need, strict=True)]
    linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2]).logprobs.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [bool(wanted) for wanted in need]


def test_no_grad_saves_nothing_and_inputs_are_left_alone():
    hidden, weight, targets, _ = inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    versions = [x._version for x in leaves]
    with torch.no_grad():
        assert linear_logprobs(*leaves, targets).logprobs.grad_fn is None
    out = linear_logprobs(*leaves, targets, temperature=0.5)
    out.logprobs.sum().backward()
    assert [x._version for x in leaves] == versions and not out.lse.requires_grad


def test_what_is_saved_does_not_grow_with_the_vocabulary():
    """NeMo-RL#4222: saved for backward are the inputs and a few numbers a row."""
    hidden, weight, targets, _ = inputs(t=50, h=8, v=4000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, want_entropy=True)
    assert sum(saved) <= hidden.numel() + weight.numel() + 12 * 50


def test_backward_twice_and_never_through_itself():
    hidden, weight, targets, _ = inputs()
    x = hidden.requires_grad_()
    loss = linear_logprobs(x, weight, targets).logprobs.sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])
    once = torch.autograd.grad(linear_logprobs(x, weight, targets).logprobs.sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        once.sum().backward()


def test_a_hidden_state_that_is_not_a_leaf():
    hidden, weight, targets, _ = inputs()
    grads = []
    for op in (linear_logprobs, reference.linear_logprobs):
        x = hidden.clone().requires_grad_()
        op(torch.tanh(x) * 2, weight, targets).logprobs.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_autocast_narrows_the_operands_and_nothing_else():
    """Liger-Kernel#1283: fp32 parameters, bf16 activations. Statistics stay fp32, and so does the weight gradient."""
    hidden, weight, targets, draw = inputs(t=64, v=3000, dtype=torch.float32)
    upstream = draw(3, 64).float()
    results = []
    for autocast in (True, False):
        x, w = hidden.bfloat16().float().requires_grad_(), weight.bfloat16().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = linear_logprobs(x, w, targets, want_entropy=True, want_sum_sq=True)
            loss = (torch.stack([out.logprobs, out.entropy, out.sum_sq]) * upstream).sum()
        loss.backward()
        results.append(([value.detach() for value in out], x.grad, w.grad))
    for narrow, wide in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(narrow, wide, atol=2e-5, rtol=0)
    for narrow, wide in zip(results[0][1:], results[1][1:], strict=True):
        assert narrow.dtype == torch.float32 and relative(narrow, wide) < 3e-3
    assert not torch.equal(results[0][2], results[0][2].bfloat16().float())


def test_fp32_inputs_stay_fp32_whatever_the_process_allows():
    hidden, weight, targets, _ = inputs(t=64, h=64, v=3000, dtype=torch.float32)
    truth = reference.linear_logprobs(hidden.double(), weight.double(), targets).logprobs
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        ours = linear_logprobs(hidden, weight, targets).logprobs
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert float((ours - truth).abs().max()) < 1e-5


def test_threads_and_the_switch_of_products():
    """Each thread puts the process-wide switch back: fp32 products elsewhere stay fp32."""
    hidden, weight, targets, _ = inputs(t=200, v=3000, dtype=torch.bfloat16)
    before = torch.backends.mkldnn.matmul.fp32_precision
    expected, found = linear_logprobs(hidden, weight, targets).logprobs, []
    run = lambda: found.append(linear_logprobs(hidden, weight, targets).logprobs)  # noqa: E731
    workers = [threading.Thread(target=run) for _ in range(8)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert len(found) == 8 and all(torch.allclose(expected, x, atol=1e-5) for x in found)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_compiles_as_one_graph():
    """Liger-Kernel#1350: and python floats do not turn outputs into fp64."""
    hidden, weight, targets, _ = inputs(dtype=torch.float32)

    def loss(x, w):
        out = linear_logprobs(x, w, targets, temperature=0.7, want_entropy=True)
        return out.logprobs.sum() + 0.1 * out.entropy.sum()

    grads = []
    for fn in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = fn(x, w)
        value.backward()
        assert value.dtype == torch.float32
        grads.append((value.detach(), x.grad, w.grad))
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(eager, compiled)


def poisoned(new):
    def make(*args, **options):
        out = new(*args, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return make


def test_no_number_is_read_before_it_is_written(monkeypatch):
    hidden, weight, targets, _ = inputs(t=CACHED_ROWS * 3 + 5, dtype=torch.bfloat16)

    def run():
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprobs(x, w, targets, want_entropy=True, want_sum_sq=True, temperature=0.9)
        (out.logprobs + out.entropy + out.sum_sq).sum().backward()
        return [value.detach() for value in out] + [x.grad, w.grad]

    clean = run()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    assert all(torch.equal(a, b) for a, b in zip(clean, run(), strict=True))
