"""Kept sets on a CPU: the gather path against the twin over full logits, in fp64, and its laws."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from csrc_triton import kept as kept_module
from csrc_triton import reference
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.kept import (
    KeptStats,
    Members,
    check_kept,
    kept_backward,
    kept_logprobs,
    kept_of_rows,
    member_dlin,
)
from tests.csrc_triton.kept_sets import HEADS, compute, differences, problem, singles, to, truth


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", [(25, 50, 24), (1, 2, 3), (7, 1, 5)])
def test_values_and_gradients(name, shape):
    case = problem(*shape, **HEADS[name])
    values, grads = differences(compute(*case), truth(*case))
    assert max(values) <= 1e-11
    assert max(grads) <= 1e-10


@pytest.mark.parametrize("terms", ["a", "b", "g"])
def test_each_upstream_alone(terms):
    head, rows, kept, up = problem(softcap=4.0)
    up = Upstream(*(value if name in terms else None for name, value in zip("abg", up, strict=True)))
    _, grads = differences(compute(head, rows, kept, up), truth(head, rows, kept, up))
    assert max(grads) <= 1e-10


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, head, rows, kept):
        ctx.head, ctx.rows = head._replace(weight=weight, bias=bias), rows._replace(hidden=hidden)
        ctx.stats = kept_logprobs(ctx.head, ctx.rows, kept, True, True)
        return ctx.stats.logprobs, ctx.stats.entropy, ctx.stats.sum_sq

    @staticmethod
    def backward(ctx, *up):
        grads = HeadGrads(torch.zeros_like(ctx.head.weight), torch.zeros_like(ctx.head.bias), True)
        dx = kept_backward(ctx.head, ctx.rows, ctx.stats, Upstream(*up), grads)
        return dx, grads.weight, grads.bias, None, None, None


def test_gradcheck():
    head, rows, kept, _ = problem(6, 9, 3, bias=True, softcap=5.0, scale=0.7, gap=3.0)
    leaves = [x.requires_grad_() for x in (rows.hidden, head.weight, head.bias)]
    assert torch.autograd.gradcheck(lambda *x: Gathered.apply(*x, head, rows, kept), leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_set_of_one_is_sure_and_still(dtype):
    head, rows, kept, up = problem(bias=True, offset=200.0)
    head, rows = to(head, dtype), to(rows, dtype)._replace(temperature=rows.temperature.float())
    stats, dx, _ = compute(head, rows, kept, up if dtype == torch.float64 else to(up, torch.float32))
    alone = singles(25)
    assert alone.any() and not stats.logprobs[alone].any() and not stats.entropy[alone].any()
    assert bool((stats.sum_sq[alone] == 1).all()) and not dx[alone].any()
    assert bool((stats.logprobs[~alone] < 0).all())
    only = [x[alone] for x in rows], kept_of_rows(kept, torch.nonzero(alone)[:, 0])
    up = Upstream(*(torch.full((int(alone.sum()),), 3.0, dtype=stats.logprobs.dtype) for _ in range(3)))
    _, _, grads = compute(head, Rows(*only[0]), only[1], up)
    assert not grads.weight.any() and not grads.bias.any()


def test_the_gradient_of_a_sure_token_keeps_its_digits():
    """1 - p at p = 1 - 1e-4: the difference of fp32 numbers would be off by 1e-4 of it."""
    z = torch.tensor([0.0, -9.2])
    log_s = torch.log1p(z[1:].double().exp()).float()
    members = Members(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([0, 0]))
    stats = KeptStats(-log_s, log_s, None, None, torch.zeros(1), log_s, z, members)
    rows = Rows(torch.zeros(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    dlin = member_dlin(Head(torch.zeros(2, 1), None, 1.0, None), rows, stats, Upstream(torch.ones(1), None, None))
    exact = torch.sigmoid(z[1:].double())
    torch.testing.assert_close(dlin.double(), torch.cat([exact, -exact]), rtol=1e-6, atol=0)


def test_all_ids_kept_is_no_kept_set():
    head, rows, _, up = problem(9, 30, 8, bias=True, softcap=6.0)
    everything = torch.arange(10) * 30, torch.arange(30).repeat(9)
    stats, _, _ = compute(head, rows, everything, up)
    out = reference.linear_logprobs(
        rows.hidden,
        head.weight,
        rows.targets,
        bias=head.bias,
        temperature=rows.temperature,
        softcap=6.0,
        want_entropy=True,
        want_sum_sq=True,
    )
    for got, wanted in zip((stats.logprobs, stats.entropy, stats.lse, stats.sum_sq), out, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def test_order_repetition_and_type_of_ids_change_nothing():
    head, rows, (indptr, ids), up = problem()
    first = compute(head, rows, (indptr, ids), up)
    turned = torch.cat([ids[a:b].flip(0) for a, b in itertools.pairwise(indptr)]).int()
    twice = torch.cat([ids[a:b].repeat(2) for a, b in itertools.pairwise(indptr)])
    for kept in ((indptr, turned), (2 * indptr, twice)):
        again = compute(head, rows, kept, up)
        assert all(torch.equal(x, y) for x, y in zip(first[0][:4], again[0][:4], strict=True))
        assert torch.equal(first[1], again[1]) and torch.equal(first[2].weight, again[2].weight)


@pytest.mark.parametrize("numbers", [1, 24 * 7])
def test_chunks_change_nothing_but_the_memory(numbers, monkeypatch):
    case = problem()
    whole = compute(*case)
    monkeypatch.setattr(kept_module, "CHUNK_NUMBERS", numbers)
    parts = compute(*case)
    torch.testing.assert_close(parts[0][:4], whole[0][:4])
    torch.testing.assert_close(parts[1], whole[1])
    torch.testing.assert_close(parts[2].weight, whole[2].weight)


def test_memory_follows_the_members(monkeypatch):
    """Nothing of T x V numbers is ever made, and gathered rows stay within a chunk."""
    head, rows, kept, up = problem(64, 3000, 8)
    monkeypatch.setattr(kept_module, "CHUNK_NUMBERS", 512)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape != head.weight.shape:
                largest = max(largest, out.numel())
            return out

    grads = HeadGrads(torch.zeros_like(head.weight), None, True)
    with Watch():
        kept_backward(head, rows, kept_logprobs(head, rows, kept, True, True), up, grads)
    assert largest <= max(512, 2 * (kept[1].shape[0] + 64))


def test_bf16_inputs_lose_no_digits():
    head, rows, kept, up = problem(64, 200, 64, gap=12.0)
    head, rows = to(head, torch.bfloat16), to(rows, torch.bfloat16)._replace(temperature=rows.temperature.float())
    values, grads = differences(compute(head, rows, kept, to(up, torch.float32)), truth(head, rows, kept, up))
    assert max(values) <= 3e-5 and max(grads) <= 1e-5


def test_gradients_nobody_wants_are_not_made():
    head, rows, kept, up = problem(bias=True)
    stats = kept_logprobs(head, rows, kept, True, True)
    whole = compute(head, rows, kept, up)
    assert kept_backward(head, rows, stats, up, HeadGrads(None, None, False)) is None
    bias = torch.zeros_like(head.bias)
    assert kept_backward(head, rows, stats, up, HeadGrads(None, bias, False)) is None
    torch.testing.assert_close(bias, whole[2].bias)
    assert torch.equal(kept_backward(head, rows, stats, up, HeadGrads(None, None, True)), whole[1])
    short = kept_logprobs(head, rows, kept, False, False)
    assert short.entropy is None and short.sum_sq is None and torch.equal(short.logprobs, stats.logprobs)


def test_a_repeated_call_gives_the_same_bits_and_reads_nothing_unwritten(monkeypatch):
    case = problem(bias=True)
    first = compute(*case)
    real = torch.empty

    def poison(*size, **options):
        fresh = real(*size, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", poison)
    again = compute(*case)
    assert all(torch.equal(x, y) for x, y in zip(first[0][:4], again[0][:4], strict=True))
    assert torch.equal(first[1], again[1]) and torch.equal(first[2].weight, again[2].weight)


def test_no_rows():
    head, rows, _, _ = problem(3)
    none = Rows(*(x[:0] for x in rows))
    up = Upstream(*(torch.zeros(0, dtype=torch.float64) for _ in range(3)))
    stats, dx, grads = compute(head, none, (torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)), up)
    assert stats.logprobs.shape == stats.entropy.shape == (0,) and dx.shape == (0, 24) and not grads.weight.any()


def test_sets_of_some_rows():
    _, _, (indptr, ids), _ = problem(12)
    picked = kept_of_rows((indptr, ids), torch.tensor([3, 1, 8]))
    sets = [ids[indptr[row] : indptr[row + 1]] for row in (3, 1, 8)]
    assert picked[0].tolist() == [0, *torch.tensor([len(x) for x in sets]).cumsum(0).tolist()]
    assert torch.equal(picked[1], torch.cat(sets))
    assert kept_of_rows((indptr, ids), torch.zeros(0, dtype=torch.int64))[0].tolist() == [0]


BAD = [
    ([0, 1], [0], "kept[0] must be (T+1,) = (3,), got (2,)"),
    ([0, 2, 1], [0], "kept[0] must start at 0 and never fall"),
    ([1, 1, 1], [0], "kept[0] must start at 0 and never fall"),
    ([0, 1, 3], [0, 1], "kept[1] must hold kept[0][-1] = 3 ids, got 2"),
    ([0, 1, 2], [0, 9], "kept[1] must be in [0, 9), got 9"),
    ([0, 1, 2], [-1, 0], "kept[1] must be in [0, 9), got -1"),
    ([0, 1, 2], [0.0, 1.0], "kept[1] must be (nnz,) int32 or int64, got (2,) torch.float32"),
    ([0.0, 1.0, 2.0], [0, 1], "kept[0] must be int64, got torch.float32"),
]


@pytest.mark.parametrize(("indptr", "ids", "message"), BAD)
def test_bad_sets_are_named(indptr, ids, message):
    with pytest.raises(ValueError) as error:
        check_kept((torch.tensor(indptr), torch.tensor(ids)), 2, 9)
    assert message in str(error.value)
