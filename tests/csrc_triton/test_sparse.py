"""The sparse backward: within its tolerance of the exact one, and the exact one where it would not be."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from csrc_triton import LossTerms, grpo, linear_grpo_loss, reference, sparse
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


def one_chunk(hidden, weight, targets, a, tolerance, keep=None):
    """The backend, dX and dW, at a temperature of 0.9; `a` are the coefficients of the kept rows."""
    head = Head(weight, None, 1.0, None)
    dw = torch.zeros_like(weight)
    backend = SparseBackend(head, hidden, None, tolerance) if tolerance else TorchBackend(head, hidden, None)
    rows = Rows(hidden, torch.full((len(targets),), 0.9), targets)
    backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
    return backend, backend.backward(keep, Upstream(a, None, None), HeadGrads(dw, None, True)), dw


def exact_chunk(hidden, weight, targets, a):
    x, w = hidden.double(), weight.double()
    dlin = -torch.softmax(x @ w.T / 0.9, -1)
    dlin[torch.arange(len(a)), targets] += 1
    dlin *= a.double()[:, None] / 0.9
    return dlin @ w, dlin.T @ x


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    gap=st.floats(1.0, 9.0),
    heavy=st.floats(0.0, 4.0),
    alike=st.floats(0.0, 0.95),
    odd=st.sampled_from([0.0, 3.0]),
    num_targets=st.integers(1, 60),
    smallest=st.integers(5, 14),
    scale=st.sampled_from([1.0, 1e-12, 1e12]),
    tolerance=st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5]),
)
@example(1, 4.0, 4.0, 0.0, 0.0, 60, 6, 1.0, 0.5)
def test_the_bound_holds(seed, gap, heavy, alike, odd, num_targets, smallest, scale, tolerance):
    """Few rows that count for most, of either sign; rows alike; targets that meet again with the other sign.

    Where `odd` is not 0, half of W lies that far from the rest, and the row that counts most is the only one there.
    """
    hidden, weight, _, draw = inputs(60, 16, 3000, torch.float32, seed, gap)
    hidden = (1 - alike**2) ** 0.5 * hidden + alike * draw(16).float()
    if odd:
        weight[1500:, 0] += odd
        hidden[:, 0] = torch.where(torch.arange(60) == 2, 2.0, -2.0)
    targets = torch.multinomial(torch.softmax(hidden @ weight.T, -1), 1)[:, 0][torch.arange(60) % num_targets]
    a = scale * (draw(60).sign() * (heavy * draw(60)).exp()).float()
    a[2] *= 10 if odd else 1
    keep = torch.arange(seed % 3, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "SMALLEST", 2.0**-smallest)
        _, dx, dw = one_chunk(hidden, weight, targets, a[keep], tolerance, keep)
    exact = exact_chunk(hidden[keep], weight, targets[keep], a[keep])
    for got, want in zip((dx, dw), exact, strict=True):
        assert relative(got, want) <= tolerance + 1e-4


def test_a_heavy_row_with_another_tail_counts_by_its_own_weight(monkeypatch):
    """400 rows, all tail. What the heavy one leaves out is far from the others', whose mean row stands in for it."""
    monkeypatch.setattr(sparse, "SMALLEST", 2.0**-8)
    weight = 0.02 * inputs(v=4000)[1].float()
    weight[8:2000, 0] += 1.0
    weight[2000:, 1] += 1.0
    hidden, a = torch.zeros(400, 24), torch.ones(400)
    hidden[1:, 0], hidden[0, 1], a[0] = 6.0, 6.0, 20.0
    case = (hidden, weight, torch.arange(400) % 2, a)
    _, dx, _ = one_chunk(*case, tolerance=0.5)
    assert relative(dx, exact_chunk(*case)[0]) <= 0.5


def test_dw_has_a_bound_of_its_own(monkeypatch):
    """All that is left out is one row of W many times over: dX loses nothing, dW loses what those ids get."""
    monkeypatch.setattr(sparse, "SMALLEST", 2.0**-6)
    hidden, weight, *_ = inputs(40, 16, 100, torch.float32)
    weight[1:] = 0.0
    case = (hidden, weight, torch.zeros(40).long(), torch.ones(40))
    _, dx, dw = one_chunk(*case, tolerance=0.05)
    for got, want in zip((dx, dw), exact_chunk(*case), strict=True):
        assert relative(got, want) <= 0.05


def test_rows_left_out_do_not_move_the_bounds(monkeypatch):
    found = []

    def note(error, result, bound=sparse.relative_bound):
        found.append(bound(error, result))
        return found[-1]

    monkeypatch.setattr(sparse, "relative_bound", note)
    hidden, weight, targets, a = problem(8.0)
    keep = torch.nonzero(a)[:, 0]
    one_chunk(hidden, weight, targets, a[keep], 0.05, keep)
    one_chunk(hidden[keep], weight, targets[keep], a[keep], 0.05)
    assert found[:2] == pytest.approx(found[2:], rel=1e-3)
    assert 0 < max(found) < 0.05


def test_a_nan_stays_in_its_row():
    hidden, weight, targets, advantages = problem(8.0)
    advantages[5] = float("nan")
    for tolerance in (None, 0.05):
        _, dx, dw = one_chunk(hidden, weight, targets, advantages, tolerance)
        assert torch.nonzero(dx.isnan().any(-1))[:, 0].tolist() == [5]
        assert dw.isnan().all()


@pytest.mark.parametrize("gap", [3.0, 5.0, 8.0])
@pytest.mark.parametrize("tolerance", [1e-3, 0.05, 0.5])
def test_the_error_stays_under_the_tolerance(gap, tolerance):
    case = problem(gap, v=20000)
    _, dx, dw = gradients(*case, sparse_tolerance=tolerance)
    for got, want in zip((dx, dw), truth(*case), strict=True):
        assert relative(got, want) <= tolerance


def test_peaked_rows_take_the_sparse_way_and_flat_ones_do_not():
    for gap, v, expected in ((8.0, 4000, 0), (1.0, 40000, 1)):
        assert one_chunk(*problem(gap, v=v), tolerance=0.05)[0].num_dense == expected


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
