"""The row kernels and the backend around them, in Triton's interpreter, against the naive twin in fp64."""

import pytest
import torch

from csrc_triton import reference
from csrc_triton.cublas import CublasBackend, launch_row_dz, launch_row_stats, row_bytes
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import chunk_rows
from tests.csrc_triton.inputs import twin
from tests.interpreter.poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(t=7, v=127, h=24, seed=0, gap=8.0, bias=False, softcap=None, scale=1.0, banned=(), offset=0.0, ramp=0.0):
    """Rows of fp32 numbers with logits from nearly flat to one token `gap` above the others, and their head."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    hidden = draw(t, h) * torch.linspace(0.01, 1.0, t)[:, None]
    weight = draw(v, h) * (gap / 2 / h**0.5)
    targets = torch.randint(0, v, (t,), generator=g)
    targets[::2] = (hidden[::2] @ weight.T).argmax(1)  # half of the targets are the likeliest token
    offsets = draw(v) + offset + torch.linspace(0, ramp, v) if bias or banned or offset or ramp else None
    if offsets is not None and banned:
        offsets[list(banned)] = float("-inf")
    temperature = torch.linspace(0.5, 1.6, t)
    return Head(weight, offsets, scale, softcap), Rows(hidden, temperature, targets), draw


def truth(head: Head, rows: Rows, up: Upstream, keep=None):
    """Statistics and gradients by autograd of the twin, fp64."""
    leaves, out = twin(head, rows)
    fields = (out.logprobs, out.entropy, out.sum_sq)
    pick = lambda x: x if keep is None else x[keep]  # noqa: E731
    pairs = [(u, pick(x)) for u, x in zip(up, fields, strict=True) if u is not None]
    grads = torch.autograd.grad(sum((u.double() * x).sum() for u, x in pairs), leaves)
    return type(out)(*(x.detach() for x in out)), grads


def run(head: Head, rows: Rows, up: Upstream, keep=None):
    backend = CublasBackend(head, rows.hidden, None)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    grads = HeadGrads(torch.zeros_like(head.weight), torch.zeros(head.weight.shape[0]), True)
    return stats, backend.backward(keep, up, grads), grads


def relative(got, want):
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def largest_logit(head: Head, rows: Rows) -> float:
    z = reference.logits(*(x.double() if x is not None else None for x in (rows.hidden, head.weight, head.bias)),
                         rows.temperature.double(), head.logit_scale, head.softcap)  # fmt: skip
    return float(z[z.isfinite()].abs().max())


CASES = {
    "plain": {},
    "one row": {"t": 1},
    "ragged": {"t": 33, "v": 127, "h": 8},
    "one id": {"v": 1},
    "two ids": {"v": 2, "t": 33},
    "several blocks": {"v": 5000, "t": 7},
    "later blocks higher": {"v": 5000, "t": 3, "ramp": 12.0},
    "later blocks lower": {"v": 5000, "t": 3, "ramp": -12.0},
    "bias": {"bias": True},
    "banned": {"banned": (0, 3, 126), "v": 127},
    "first block banned": {"banned": range(4096), "v": 5000, "t": 2},
    "softcap": {"softcap": 5.0, "bias": True},
    "softcap, blocks": {"softcap": 3.0, "v": 5000, "t": 3},
    "scale": {"scale": 0.3},
    "offset up": {"offset": 200.0, "v": 5000, "t": 3},
    "offset down": {"offset": -200.0, "v": 5000, "t": 3},
    "peaked": {"gap": 60.0, "t": 33},
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_and_gradients(case):
    head, rows, draw = problem(**CASES[case])
    t, v = rows.hidden.shape[0], head.weight.shape[0]
    if head.bias is not None:
        rows = rows._replace(targets=torch.where(head.bias.isinf()[rows.targets], v // 2 + v // 3, rows.targets))
    up = Upstream(draw(t), draw(t), draw(t))
    stats, dx, grads = run(head, rows, up)
    want, wanted_grads = truth(head, rows, up)
    room = 5e-7 * largest_logit(head, rows)
    for got, exact, bound in (
        (stats.logprobs, want.logprobs, 1e-5 + room),
        (stats.lse, want.lse, 1e-5 + room),
        (stats.entropy, want.entropy, 2e-5 + room),
        (stats.sum_sq, want.sum_sq, 2e-5 + room),
    ):
        assert float((got - exact).abs().max()) <= bound
    assert bool((stats.logprobs <= 0).all())
    if v == 1:
        assert all(float(x.abs().max()) < 1e-5 for x in (dx, grads.weight, grads.bias))
        return
    bound = 1e-5 + 2 * room  # an error of the logits is one of the probabilities
    assert relative(dx, wanted_grads[0]) <= bound and relative(grads.weight, wanted_grads[1]) <= bound
    if head.bias is not None:
        assert relative(grads.bias, wanted_grads[2]) <= bound


@pytest.mark.parametrize("terms", ["a", "b", "g", "ab", "ag", "bg"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_each_upstream_alone(terms, softcap):
    """Left-out statistics are not computed, and left-out gradients are not read."""
    head, rows, draw = problem(t=5, softcap=softcap)
    up = Upstream(*(draw(5) if name in terms else None for name in "abg"))
    backend = CublasBackend(head, rows.hidden, None)
    stats = backend.forward(rows, want_entropy="b" in terms, want_sum_sq="g" in terms, want_grad=True)
    assert (stats.entropy is None, stats.sum_sq is None) == ("b" not in terms, "g" not in terms)
    grads = HeadGrads(torch.zeros_like(head.weight), None, True)
    dx = backend.backward(None, up, grads)
    _, wanted = truth(head, rows, up)
    assert relative(dx, wanted[0]) <= 2e-5 and relative(grads.weight, wanted[1]) <= 2e-5


@pytest.mark.parametrize("keep", [[], [4], [0, 3, 6], [1, 2, 5]])
def test_kept_rows_alone_add_to_the_gradients(keep):
    head, rows, draw = problem(bias=True)
    keep = torch.tensor(keep, dtype=torch.int64)
    up = Upstream(*(draw(len(keep)) for _ in range(3)))
    _, dx, grads = run(head, rows, up, keep)
    assert dx.shape == (len(keep), 24)
    if len(keep) == 0:
        assert not grads.weight.any() and not grads.bias.any()
        return
    _, wanted = truth(head, rows, up, keep)
    for got, exact in ((dx, wanted[0][keep]), (grads.weight, wanted[1]), (grads.bias, wanted[2])):
        assert relative(got, exact) <= 2e-5


def test_buffers_serve_chunk_after_chunk_and_gradients_add_up():
    head, rows, draw = problem(t=9)
    up = Upstream(draw(9), draw(9), None)
    backend = CublasBackend(head, rows.hidden, 4 * head.weight.numel() + 4 * 1024)  # room for 4 rows
    assert backend.num_rows == 4
    grads, parts = HeadGrads(torch.zeros_like(head.weight), None, True), []
    for part in torch.arange(9).split(4):
        backend.forward(rows.pick(part), want_entropy=True, want_sum_sq=False, want_grad=True)
        parts.append(backend.backward(None, Upstream(up.logprobs[part], up.entropy[part], None), grads))
    _, wanted = truth(head, rows, up)
    assert relative(torch.cat(parts), wanted[0]) <= 2e-5 and relative(grads.weight, wanted[1]) <= 2e-5


def test_what_rounding_takes_from_the_target_is_handed_back():
    """dlin in fp16 (the interpreter has no right bf16), rows beyond the kept ones 0, columns beyond V untouched."""
    head, rows, draw = problem(t=7, v=127, gap=30.0)
    raw = rows.hidden @ head.weight.T
    stats = launch_row_stats(raw, head, rows, want_entropy=True, want_sum_sq=False)
    keep, up = torch.tensor([0, 2, 5]), Upstream(draw(3), 0.1 * draw(3), None)
    exact = torch.full((8, 128), 7.0)
    zero = launch_row_dz(raw, head, rows, stats, keep, up, exact[:, :127])
    assert torch.equal(zero, torch.zeros(3))
    rounded = torch.full((8, 128), 7.0, dtype=torch.float16)
    residual = launch_row_dz(raw, head, rows, stats, keep, up, rounded[:, :127])
    assert torch.equal(rounded[:3, :127], exact[:3, :127].half())
    at = (torch.arange(3), rows.targets[keep])
    assert torch.equal(rounded[at].float() + residual, exact[at]) and bool((residual != 0).any())
    assert not rounded[3:, :127].any() and bool((rounded[:, 127] == 7).all())


def test_low_precision_dx_has_the_target_entry_in_full():
    """Flat rows: all rounding error that counts is the target's. fp16 rounds by 2^-11."""
    head, rows, draw = problem(t=9, gap=0.5)
    head, rows = head._replace(weight=head.weight.half()), rows._replace(hidden=rows.hidden.half())
    up = Upstream(draw(9), None, None)
    backend = CublasBackend(head, rows.hidden, None)
    backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
    grads = HeadGrads(torch.zeros(head.weight.shape), None, True)
    dx = backend.backward(None, up, grads)
    _, wanted = truth(head, rows, up)
    assert dx.dtype == torch.float32
    assert relative(dx, wanted[0]) <= 5e-5 and relative(grads.weight, wanted[1]) <= 1e-3


def test_the_gradient_of_a_sure_token_keeps_its_digits():
    """1 - p at p = 1 - 1e-4: the difference of fp32 numbers would be off by 1e-3 of it."""
    raw = torch.tensor([[0.0, -9.2, -12.0]])
    head = Head(torch.zeros(3, 1), None, 1.0, None)
    rows = Rows(torch.zeros(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    stats = launch_row_stats(raw, head, rows, want_entropy=False, want_sum_sq=False)
    stats = stats._replace(logprobs=torch.log_softmax(raw.double(), -1)[:, 0].float())
    dlin = torch.empty(1, 3)
    launch_row_dz(raw, head, rows, stats, None, Upstream(torch.ones(1), None, None), dlin)
    exact = -torch.expm1(torch.log_softmax(raw.double(), -1)[0, 0])
    assert abs(float(dlin[0, 0]) / float(exact) - 1) < 1e-6


@pytest.mark.parametrize("bad", [-1, 127, -100, 1 << 40])
def test_a_target_outside_the_vocabulary_makes_its_row_nan(bad):
    head, rows, draw = problem()
    rows.targets[3] = bad
    backend = CublasBackend(head, rows.hidden, None)
    stats = backend.forward(rows, want_entropy=True, want_sum_sq=True, want_grad=True)
    dx = backend.backward(None, Upstream(draw(7), draw(7), draw(7)), HeadGrads(None, None, True))
    others = torch.arange(7) != 3
    for value in (stats.logprobs, stats.lse, stats.entropy, stats.sum_sq, dx):
        assert bool(value[3].isnan().all()) and bool(value[others].isfinite().all())


def test_nan_in_hidden_is_not_hidden():
    head, rows, draw = problem(v=5000, t=3)
    rows.hidden[1, 0] = float("nan")
    stats, dx, _ = run(head, rows, Upstream(draw(3), None, None))
    assert stats.logprobs[1].isnan() and bool(dx[1].isnan().all()) and bool(dx[::2].isfinite().all())


def test_a_repeated_call_gives_the_same_bits():
    head, rows, draw = problem(t=33, bias=True)
    up = Upstream(draw(33), draw(33), draw(33))
    (stats, dx, grads), again = run(head, rows, up), run(head, rows, up)
    assert all(torch.equal(x, y) for x, y in zip((*stats, dx), (*again[0], again[1]), strict=True))
    assert torch.equal(grads.weight, again[2].weight)


def test_rows_of_a_chunk_follow_the_budget():
    head, rows, _ = problem(t=200, v=127, h=8)
    each, fixed = row_bytes(rows.hidden, 127), 4 * 127 * 8
    assert each == 8 * 128
    assert chunk_rows(rows.hidden, head.weight, each, fixed + 10 * each + 5) == 10
    assert chunk_rows(rows.hidden, head.weight, each, 0) == 1
    assert chunk_rows(rows.hidden, head.weight, each, None) == 256  # all rows, up to whole tiles


def test_a_budget_too_small_for_a_gpu_is_refused_with_the_bytes_needed():
    gpu = lambda *shape: FakeOnGpu(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))  # noqa: E731
    hidden, weight = gpu(9000, 64), gpu(1000, 64)
    each, fixed = 6 * 1024, 4 * 1000 * 64
    with pytest.raises(ValueError, match=f"at least {fixed + 256 * each} for this head"):
        chunk_rows(hidden, weight, each, fixed + 255 * each)
    with pytest.warns(UserWarning, match="below 2048 rows"):
        assert chunk_rows(hidden, weight, each, fixed + 300 * each) == 256
    assert chunk_rows(hidden, weight, each, 1 << 40) == 8192
    assert chunk_rows(gpu(100, 64), weight, each, fixed + 128 * each) == 128  # no more rows than there are


class FakeOnGpu:
    """A tensor that says it is on CUDA, for arithmetic on shapes."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self.shape, self.numel, self.element_size = tensor.shape, tensor.numel, tensor.element_size
