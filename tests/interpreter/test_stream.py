"""The streaming kernels in Triton's interpreter: statistics and gradients against the fp64 twin, and contracts."""

import pytest
import torch

from csrc_triton import reference
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import CONFIGS as TABLE
from csrc_triton.launch import Config, chunk_rows
from csrc_triton.stream import Configs, StreamBackend, add_target_residual, row_bytes, slab_backward
from tests.csrc_triton.inputs import twin

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's log2(0), max of nan

TILE = Config(16, 32, 16, 4, 1)
CONFIGS = Configs(TILE, TILE, TILE, Config(16, 16, 0, 4, 1), Config(8, 0, 4, 4, 1))


def problem(t=33, v=127, h=24, seed=0, gap=20.0, bias=None, softcap=None, scale=1.0):
    """Rows from nearly flat to one id `gap` above the others, and their head; half of the targets are the top id."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    hidden, weight = draw(t, h), draw(v, h) / h**0.5
    logits = hidden @ weight.T
    peak = torch.linspace(0, gap, t) / logits.amax(1).clamp(min=0.1)
    hidden = hidden * (0.05 + peak[:, None])
    targets = torch.randint(0, v, (t,), generator=g)
    targets[::2] = logits.argmax(1)[::2]
    temperature = 0.4 + 1.5 * torch.rand(t, generator=g)
    return Head(weight, bias(draw(v)) if bias else None, scale, softcap), Rows(hidden, temperature, targets), draw


def banned(bias):
    bias[1::5] = float("-inf")
    return bias


OPTIONS = {
    "plain": {},
    "peaked": {"gap": 60.0},
    "bias": {"bias": lambda b: b},
    "above": {"bias": lambda b: b + 200},
    "below": {"bias": lambda b: b - 200},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 5.0},
    "softcap bias": {"softcap": 30.0, "bias": lambda b: 3 * b, "scale": 1.7},
    "banned": {"bias": banned},
}
SHAPES = [(1, 1, 8), (7, 2, 8), (33, 127, 24), (7, 300, 40), (33, 65, 10)]


def truth(head, rows, keep=None, up=None):
    """fp64 values of the twin and, for upstream gradients, those by hidden, weight and bias."""
    leaves, out = twin(head, rows)
    if up is None:
        return out, []
    pairs = [(u, x) for u, x in zip(up, (out.logprobs, out.entropy, out.sum_sq), strict=True) if u is not None]
    kept = slice(None) if keep is None else keep
    return out, list(torch.autograd.grad(sum((u.double() * x[kept]).sum() for u, x in pairs), leaves))


def largest_logit(head, rows):
    z = reference.logits(rows.hidden, head.weight, head.bias, rows.temperature, head.logit_scale, head.softcap)
    return z[z.isfinite()].abs().max().item()


def check_values(stats, head, rows, expected):
    unit = 1e-5 + 5e-7 * largest_logit(head, rows)
    live = expected.logprobs > -1e29  # the twin says -inf where the target is banned, we say -1e30 and less
    assert (stats.logprobs - expected.logprobs)[live].abs().max() <= unit
    assert (stats.logprobs[~live] < -1e29).all() and (stats.logprobs <= 0).all()
    assert (stats.lse - expected.lse).abs().max() <= unit
    assert (stats.entropy - expected.entropy).abs().max() <= unit + 1e-5
    assert (stats.sum_sq - expected.sum_sq).abs().max() <= unit


def new_grads(head):
    return HeadGrads(torch.zeros_like(head.weight), torch.zeros(head.weight.shape[0]), True)


def relative(ours, exact):
    return ((ours - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def check_gradients(dx, grads, keep, exact):
    kept = slice(None) if keep is None else keep
    ours = [dx, grads.weight, grads.bias]
    for mine, theirs in zip(ours, [exact[0][kept], *exact[1:]], strict=False):
        assert relative(mine, theirs) <= 1e-5 or (mine - theirs).abs().max() < 1e-12  # V = 1: all is 0
    size, error = exact[0][kept].norm(dim=1), (dx - exact[0][kept]).norm(dim=1)
    counted = size > 1e-4 * size.max()  # below, 1 - p is lost in an fp32 sum
    assert (error <= 2e-3 * size)[counted].all()


def upstream(draw, k, terms="abg"):
    return Upstream(*(draw(k) if name in terms else None for name in "abg"))


@pytest.mark.parametrize("option", OPTIONS)
def test_statistics_and_gradients(option):
    head, rows, draw = problem(**OPTIONS[option])
    if option == "banned":
        rows.targets[rows.targets % 5 == 1] = 0  # a banned target has no gradient in the twin
    up = upstream(draw, 33)
    expected, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    check_values(stats, head, rows, expected)
    grads = new_grads(head)
    check_gradients(backend.backward(None, up, grads), grads, None, exact)
    grads = new_grads(head)
    check_gradients(slab_backward(head, rows, stats, up, grads, 64, TILE), grads, None, exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_shapes(shape):
    t, v, h = shape
    head, rows, draw = problem(t, v, h)
    up = upstream(draw, t)
    expected, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    check_values(stats, head, rows, expected)
    grads = new_grads(head)
    check_gradients(backend.backward(None, up, grads), grads, None, exact)
    grads = new_grads(head)
    dx = slab_backward(head, rows, stats, up, grads, 128, TILE)
    check_gradients(dx, grads, None, exact)


@pytest.mark.parametrize("terms", ["a", "b", "g", "ab"])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_each_upstream_alone(terms, softcap):
    head, rows, draw = problem(softcap=softcap, scale=0.7, gap=12.0)
    up = upstream(draw, 33, terms)
    _, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    stats = backend.forward(rows, want_entropy="b" in terms, want_sum_sq="g" in terms, want_grad=True)
    assert (stats.entropy is None) == ("b" not in terms) and (stats.sum_sq is None) == ("g" not in terms)
    grads = new_grads(head)
    check_gradients(backend.backward(None, up, grads), grads, None, exact)
    grads = new_grads(head)
    dx = slab_backward(head, rows, stats, up, grads, 128, TILE)
    check_gradients(dx, grads, None, exact)


@pytest.mark.parametrize("keep", [[0], [32], [0, 1, 2, 30, 31], list(range(1, 33, 2)), list(range(15, 33))])
def test_dropped_rows_leave_exactly_nothing(keep):
    head, rows, draw = problem(v=65, bias=lambda b: b)
    keep = torch.tensor(keep)
    up = upstream(draw, len(keep))
    _, exact = truth(head, rows, keep, up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    again = new_grads(head)
    check_gradients(slab_backward(head, rows.pick(keep), stats.pick(keep), up, again, 128, TILE), again, keep, exact)
    grads = new_grads(head)
    dx = backend.backward(keep, up, grads)
    assert dx.shape == (len(keep), 24)
    check_gradients(dx, grads, keep, exact)
    with pytest.raises(RuntimeError, match="forward"):
        backend.backward(keep, up, grads)


def test_gradients_nobody_wants_cost_nothing_and_others_are_added_into():
    head, rows, draw = problem(bias=lambda b: b)
    up = upstream(draw, 33, "a")
    _, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    for weight, bias, want in (
        (None, None, True),
        (torch.ones_like(head.weight), None, False),
        (None, head.bias * 0, False),
    ):
        backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
        dx = backend.backward(None, up, HeadGrads(weight, bias, want))
        assert (dx is None) == (not want)
        if weight is not None:
            assert relative(weight - 1, exact[1]) < 1e-4
        if bias is not None:
            assert relative(bias, exact[2]) < 1e-5


def test_later_chunks_use_the_buffer_of_the_first():
    head, rows, draw = problem(t=33)
    up = upstream(draw, 33)
    _, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    grads, parts = new_grads(head), []
    for part in torch.arange(33).split(17):
        backend.forward(rows.pick(part), want_entropy=True, want_sum_sq=True, want_grad=True)
        parts.append(backend.backward(None, Upstream(*(u[part] for u in up)), grads))
    check_gradients(torch.cat(parts), grads, None, exact)


def stats_of(head, rows, configs=CONFIGS, want_grad=False, **wanted):
    wanted = {"want_entropy": True, "want_sum_sq": True} | wanted
    return StreamBackend(head, rows.hidden, configs=configs).forward(rows, **wanted, want_grad=want_grad)


def same_bits(ours, theirs):
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True) if x is not None and y is not None)


def test_a_row_does_not_depend_on_its_batch():
    head, rows, _ = problem(t=70, v=300, bias=lambda b: b)
    # few bits: products are exact, for those of the interpreter round by a row's place
    rows = rows._replace(hidden=(rows.hidden * 8).round() / 8)
    head = head._replace(weight=(head.weight * 8).round() / 8)
    whole = stats_of(head, rows)
    for index in (torch.arange(1), torch.arange(37), torch.randperm(70, generator=torch.Generator().manual_seed(1))):
        assert same_bits(stats_of(head, rows.pick(index)), [x[index] for x in whole])
    assert same_bits(stats_of(head, rows, want_grad=True), whole)
    assert same_bits(stats_of(head, rows, want_entropy=False, want_sum_sq=False), whole)


def test_strided_rows_and_unaligned_bases():
    head, rows, _ = problem()
    turned = head.weight.T.contiguous().T
    assert same_bits(stats_of(head._replace(weight=turned), rows), stats_of(head, rows))
    wide = torch.randn(33, 31)
    wide[:, 3:27] = rows.hidden
    table = torch.randn(127, 25)
    table[:, :24] = head.weight
    ours = stats_of(head._replace(weight=table[:, :24]), rows._replace(hidden=wide[:, 3:27]))
    assert same_bits(ours, stats_of(head, rows))


def test_the_tables_own_tiles():
    """fp32 tiles of 64 ids are narrower than the blocks of the pass from E to dz."""
    head, rows, draw = problem(v=200)
    up = upstream(draw, 33)
    _, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    grads = new_grads(head)
    check_gradients(backend.backward(None, up, grads), grads, None, exact)
    grads = new_grads(head)
    check_gradients(slab_backward(head, rows, stats, up, grads, 128), grads, None, exact)


@pytest.mark.parametrize("suffix", ["", "_softcap"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_statistics_with_and_without_a_gradient_sum_the_same_tiles(arch, suffix):
    """Otherwise a ratio on-policy would not be exactly 1."""
    line = lambda kernel: TABLE.get((kernel + suffix, arch)) or TABLE[kernel, arch]  # noqa: E731
    assert line("stats")[1:3] == line("stats_store")[1:3]  # block_n, block_k


@pytest.mark.parametrize("bad", [-1, -100, 127, 128, 2**32 + 3])
def test_a_target_outside_the_vocabulary_gives_nan_in_its_row_alone(bad):
    head, rows, draw = problem()
    clean = stats_of(head, rows)
    rows.targets[5] = bad
    stats = stats_of(head, rows)
    others = torch.arange(33) != 5
    assert all(x[5].isnan() for x in stats)
    assert same_bits([x[others] for x in stats], [x[others] for x in clean])
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    dx = backend.backward(None, upstream(draw, 33), HeadGrads(None, None, True))
    assert dx[5].isnan().all() and dx[others].isfinite().all()


def test_nan_in_hidden_stays_nan():
    head, rows, _ = problem()
    rows.hidden[4, 3] = float("nan")
    stats = stats_of(head, rows)
    assert stats.logprobs[4].isnan() and stats.entropy[4].isnan() and stats.logprobs[3].isfinite()


def test_every_output_is_written(monkeypatch):
    head, rows, draw = problem(bias=lambda b: b)
    up, keep = upstream(draw, 17), torch.arange(0, 33, 2)

    def compute():
        backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
        stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
        grads = new_grads(head)
        dx = backend.backward(keep, up, grads)
        slabs = slab_backward(head, rows.pick(keep), stats.pick(keep), up, grads, 128, TILE)
        return [*stats, dx, slabs, grads.weight, grads.bias]

    clean = compute()
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    poison = lambda x: x.fill_(float("nan")) if x.is_floating_point() else x  # noqa: E731
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    assert same_bits(compute(), clean)


def test_no_rows_kept():
    head, rows, _ = problem()
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    grads = new_grads(head)
    assert backend.backward(none, Upstream(torch.empty(0), None, None), grads).shape == (0, 24)
    assert not grads.weight.any()


def test_chunk_fits_the_budget():
    head, rows, _ = problem(v=100, h=8)
    each = row_bytes(rows.hidden, 100, 32)
    assert each == 4 * 100 + 12 * 4  # E in fp32, four tiles of partials
    assert chunk_rows(rows.hidden, head.weight, each, 4 * 100 * 8 + 10 * each + 5) == 10
    assert chunk_rows(rows.hidden, head.weight, each, 1) == 1


def test_bf16():
    """Statistics keep fp32; gradients within the rounding of dz, which the interpreter cuts off: 2^-8, not 2^-9."""
    head, rows, draw = problem(v=127, gap=8.0)
    head, rows = head._replace(weight=head.weight.bfloat16()), rows._replace(hidden=rows.hidden.bfloat16())
    up = upstream(draw, 33)
    expected, exact = truth(head, rows, up=up)
    backend = StreamBackend(head, rows.hidden, configs=CONFIGS)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    check_values(stats, head, rows, expected)
    for slabs in (False, True):
        grads = HeadGrads(torch.zeros(127, 24), None, True)
        dx = slab_backward(head, rows, stats, up, grads, 128, TILE) if slabs else backend.backward(None, up, grads)
        assert dx.dtype == torch.float32
        assert relative(dx, exact[0]) < 6e-3 and relative(grads.weight, exact[1]) < 6e-3


def test_rounding_of_the_targets_entry_is_made_good_in_dx():
    head, rows, draw = problem()
    head, rows = head._replace(weight=head.weight.bfloat16()), rows._replace(hidden=rows.hidden.bfloat16())
    entry = draw(33)
    exact = entry[:, None].double() * head.weight[rows.targets].double()
    dx = (entry.bfloat16()[:, None].double() * head.weight[rows.targets].double()).float()
    assert relative(dx, exact) > 5e-4
    add_target_residual(dx, head, rows, entry)
    assert relative(dx, exact) < 1e-6
