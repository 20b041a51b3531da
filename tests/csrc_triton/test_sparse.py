"""The sparse backward: within its tolerance of the exact one, and the exact one where it would not be."""

import pytest
import torch

from csrc_triton import LossTerms, grpo, linear_grpo_loss, reference
from csrc_triton.backends import open_backend
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.rows import TorchBackend
from csrc_triton.sparse import SparseBackend
from tests.csrc_triton.inputs import inputs, relative


def problem(gap, t=64, v=4000):
    """Rows that put their mass on a few ids where `gap` is large; the target is drawn from them, as a sampler does."""
    hidden, weight, _, draw = inputs(t, 32, v, torch.float32, gap=gap)
    targets = torch.multinomial(torch.softmax(hidden @ weight.T, -1), 1)[:, 0]
    advantages = draw(t).float()
    advantages[::4] = 0
    return hidden, weight, targets, advantages


def gradients(hidden, weight, targets, advantages, **options):
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ones = torch.ones(len(targets), dtype=hidden.dtype)
    out = linear_grpo_loss(x, w, targets, {"advantages": advantages}, grpo, ones, temperature=0.9, **options)
    out.loss.backward()
    return out.loss.detach(), x.grad, w.grad


def truth(hidden, weight, targets, advantages):
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    ones = torch.ones(len(targets)).double()
    data = {"advantages": advantages.double()}
    reference.linear_grpo_loss(x, w, targets, data, grpo, ones, temperature=0.9).loss.backward()
    return x.grad, w.grad


@pytest.mark.parametrize("gap", [3.0, 5.0, 8.0])
@pytest.mark.parametrize("tolerance", [1e-3, 0.05, 0.5])
def test_the_error_stays_under_the_tolerance(gap, tolerance):
    case = problem(gap, v=20000)
    _, dx, dw = gradients(*case, sparse_tolerance=tolerance)
    for got, want in zip((dx, dw), truth(*case), strict=True):
        assert relative(got, want) <= tolerance


def test_peaked_rows_take_the_sparse_way_and_flat_ones_do_not():
    for gap, v, expected in ((8.0, 4000, 0), (1.0, 40000, 1)):
        hidden, weight, targets, advantages = problem(gap, v=v)
        backend = SparseBackend(Head(weight, None, 1.0, None), hidden, None, tolerance=0.05)
        rows = Rows(hidden, torch.ones(64), targets)
        backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
        backend.backward(None, Upstream(advantages, None, None), HeadGrads(torch.zeros_like(weight), None, True))
        assert backend.num_dense == expected


def test_the_loss_is_the_same_and_dense_chunks_are_exact():
    case = problem(1.0, v=40000)
    dense, sparse = gradients(*case), gradients(*case, sparse_tolerance=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(dense, sparse, strict=True))


def test_a_row_leaves_out_exactly_what_its_kept_entries_lack():
    """The dropped mass acts on dX through the mean row: without it the error is several times as large."""
    hidden, weight, targets, advantages = problem(4.0, v=20000)
    weight = weight + 5.0  # a mean row that is far from nothing; it moves no probability
    case = (hidden, weight, targets, advantages)
    _, dx, _ = gradients(*case, sparse_tolerance=100.0)
    assert relative(dx, truth(*case)[0]) < 0.02


def bonus(logprobs, entropy, chunk):
    return LossTerms(-logprobs * chunk["advantages"] - 0.1 * entropy)


@pytest.mark.parametrize("option", ["bias", "softcap", "entropy"])
def test_what_it_does_not_know_is_done_densely(option):
    hidden, weight, targets, advantages = problem(8.0)
    options = {"bias": {"bias": torch.zeros(4000)}, "softcap": {"softcap": 20.0}, "entropy": {}}[option]
    loss, found = bonus if option == "entropy" else grpo, []
    for tolerance in (None, 0.5):
        x = hidden.clone().requires_grad_()
        out = linear_grpo_loss(
            x, weight, targets, {"advantages": advantages}, loss, torch.ones(64),
            want_entropy=option == "entropy", sparse_tolerance=tolerance, **options,
        )  # fmt: skip
        out.loss.backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_it_is_asked_for_and_never_taken_by_itself():
    hidden, weight, *_ = problem(8.0)
    assert type(open_backend("auto", Head(weight, None, 1.0, None), hidden, None)) is TorchBackend
    with pytest.raises(ValueError, match="sparse_tolerance must be > 0 and finite, got -1"):
        gradients(*problem(8.0), sparse_tolerance=-1.0)
