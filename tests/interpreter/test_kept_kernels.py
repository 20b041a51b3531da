"""The kernels over kept sets in Triton's interpreter: fp32 against the twin in fp64."""

import itertools

import pytest
import torch

from csrc_triton.head import HeadGrads, Upstream
from csrc_triton.kept import SUMS_LAUNCH, kept_backward, kept_logprobs, launch_sums
from tests.csrc_triton.kept_sets import HEADS, compute, differences, problem, singles, to, truth
from tests.interpreter.poison import poisoned  # noqa: F401


@pytest.fixture(autouse=True)
def on_kernels(poisoned, monkeypatch):  # noqa: F811
    monkeypatch.setattr("csrc_triton.kept.use_kernels", lambda hidden, backend: True)


def single(case):
    head, rows, kept, up = case
    return to(head, torch.float32), to(rows, torch.float32), kept, to(up, torch.float32)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", [(13, 127, 24), (1, 2, 8), (7, 1, 8), (6, 50, 300)])
def test_values_and_gradients(name, shape):
    case = problem(*shape, **HEADS[name])
    values, grads = differences(compute(*single(case)), truth(*case))
    room = 5e-7 * max(200.0 if "offset" in HEADS[name] else 0.0, 2 * HEADS[name].get("gap", 8.0)) * 3
    assert max(values[:2]) <= 1e-5 + room and max(values[2:]) <= 2e-5 + room
    if shape[0] > 1:  # a single row may be so sure that its gradient is below fp32
        assert max(grads) <= 1e-5 + 2 * room


@pytest.mark.parametrize("terms", ["a", "b", "g"])
def test_each_upstream_alone(terms):
    head, rows, kept, up = problem(softcap=4.0)
    up = Upstream(*(value if name in terms else None for name, value in zip("abg", up, strict=True)))
    _, grads = differences(compute(*single((head, rows, kept, up))), truth(head, rows, kept, up))
    assert max(grads) <= 1e-5
    short = kept_logprobs(*single((head, rows, kept, up))[:3], False, False)
    assert short.entropy is None and short.sum_sq is None


def test_a_set_of_one_is_sure_and_still():
    head, rows, kept, up = single(problem(bias=True, offset=200.0))
    stats, dx, _ = compute(head, rows, kept, up)
    alone = singles(25)
    assert alone.any() and not stats.logprobs[alone].any() and not stats.entropy[alone].any()
    assert bool((stats.sum_sq[alone] == 1).all()) and not dx[alone].any()
    assert bool((stats.logprobs[~alone] < 0).all())


@pytest.mark.parametrize("bad", ["target", "member below", "member above"])
def test_an_id_outside_the_vocabulary_makes_its_row_nan(bad):
    head, rows, (indptr, ids), up = single(problem(12, bias=True))
    row = 3  # of 40 members
    if bad == "target":
        rows.targets[row] = -7
    else:
        ids[indptr[row] + 20] = -1 if bad == "member below" else 50
    stats, dx, grads = compute(head, rows, (indptr, ids), up)
    others = torch.arange(12) != row
    for value in (stats.logprobs, stats.lse, stats.entropy, stats.sum_sq, dx):
        assert bool(value[row].isnan().all()) and bool(value[others].isfinite().all())
    touched = torch.zeros(50, dtype=torch.bool)
    members = ids[indptr[row] : indptr[row + 1]]
    touched[members[(members >= 0) & (members < 50)]] = True
    assert bool(grads.weight[touched].isnan().all()) and bool(grads.weight[~touched].isfinite().all())


def test_rows_without_a_gradient_are_not_read():
    head, rows, kept, up = single(problem(12))
    live = torch.arange(12) % 3 != 0
    up = Upstream(*(torch.where(live, x, 0.0) for x in up))
    stats, dx, grads = compute(head, rows, kept, up)
    rows.hidden[~live] = float("nan")
    again = HeadGrads(torch.ones_like(head.weight), None, True)
    again_dx = kept_backward(head, rows, stats, up, again)
    assert torch.equal(again_dx, dx) and torch.equal(again.weight - 1, grads.weight) and not dx[~live].any()


@pytest.mark.parametrize("width", [8, 256, 300])
def test_segments_of_every_length(width):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(30, width + 3, generator=generator)[:, :width]
    sizes = torch.tensor([0, 1, 15, 16, 17, 100])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    index = torch.randint(0, 30, (149,), generator=generator)
    weights = torch.randn(149, generator=generator)
    room = torch.full((6, width + 1), 7.0)
    out = room[:, :width]
    launch_sums(source, index, weights, indptr, None, out)
    pieces = [(weights[a:b, None].double() * source[index[a:b]].double()).sum(0) for a, b in itertools.pairwise(indptr)]
    torch.testing.assert_close(out.double(), torch.stack(pieces), rtol=1e-5, atol=1e-5)
    into = torch.full((10, width + 1), 2.0)
    rows = torch.tensor([0, 2, 3, 5, 8, 9])  # 9 lies outside: not written
    launch_sums(source, index, weights, indptr, rows, into[:9, :width])
    wanted = torch.full((10, width + 1), 2.0)
    wanted[rows[:5], :width] += out[:5]
    torch.testing.assert_close(into, wanted)
    assert bool((room[:, width] == 7).all())
    assert SUMS_LAUNCH["BLOCK_E"] == 16 and SUMS_LAUNCH["BLOCK_H"] == 256  # what the sizes above go around


def test_a_repeated_call_gives_the_same_bits():
    case = single(problem(bias=True))
    first, again = compute(*case), compute(*case)
    assert all(torch.equal(x, y) for x, y in zip(first[0][:7], again[0][:7], strict=True))
    assert torch.equal(first[1], again[1]) and torch.equal(first[2].weight, again[2].weight)


def test_gradients_nobody_wants_are_not_made():
    head, rows, kept, up = single(problem(bias=True))
    whole = compute(head, rows, kept, up)
    assert kept_backward(head, rows, whole[0], up, HeadGrads(None, None, False)) is None
    bias = torch.zeros_like(head.bias)
    assert kept_backward(head, rows, whole[0], up, HeadGrads(None, bias, False)) is None
    torch.testing.assert_close(bias, whole[2].bias, rtol=1e-4, atol=1e-5)


def test_no_rows():
    head, rows, _, up = single(problem(3))
    none = type(rows)(*(x[:0] for x in rows))
    kept = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    stats, dx, grads = compute(head, none, kept, Upstream(*(x[:0] for x in up)))
    assert stats.logprobs.shape == stats.entropy.shape == (0,) and dx.shape == (0, 24) and not grads.weight.any()
