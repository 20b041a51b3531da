"""Kept sets of every kind: empty, the target alone, with and without the target, repeated ids, and large ones."""

import torch

from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.kept import kept_backward, kept_logprobs
from tests.csrc_triton.inputs import draws, twin

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "banned": {"bias": True, "banned": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 4.0, "bias": True},
    "offset up": {"offset": 200.0},
    "offset down": {"offset": -200.0},
    "peaked": {"gap": 60.0},
}


def problem(t=25, v=50, h=24, seed=0, gap=8.0, bias=False, banned=False, scale=1.0, softcap=None, offset=0.0):
    """(head, rows, kept, upstream) in fp64, numbers exact in fp32; temperatures differ from row to row."""
    draw = draws(seed)
    number = lambda *shape: draw(*shape).float().double()  # noqa: E731
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = number(t, h), (number(v, h) * gap / 3 / h**0.5).float().double()
    targets = torch.randint(0, v, (t,), generator=generator)
    sets = []
    for row in range(t):
        size = [3, 0, 9, min(v, 40), 0, 1][row % 6]
        ids = torch.randint(0, v, (size,), generator=generator)
        if row % 6 == 2:
            ids[[0, 4]] = targets[row]  # a member twice, the target at that
        if row % 6 == 5:
            ids = targets[row].repeat(2)
        sets.append(ids)
    ends = torch.tensor([len(ids) for ids in sets], dtype=torch.int64).cumsum(0)
    kept = torch.cat([torch.zeros(1, dtype=torch.int64), ends]), torch.cat([*sets, torch.zeros(0, dtype=torch.int64)])
    bias_values = (number(v) + offset).float().double() if bias or offset else None
    if bias_values is not None and banned:
        bias_values[1::5] = float("-inf")
        targets = torch.where(targets % 5 == 1, targets - 1, targets)
    temperature = torch.linspace(0.5, 1.6, t).double()
    up = Upstream(number(t), number(t), number(t))
    return Head(weight, bias_values, scale, softcap), Rows(hidden, temperature, targets), kept, up


def to(record, dtype):
    """A record's float tensors in another type."""
    cast = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    return type(record)(*map(cast, record))


def compute(head, rows, kept, up):
    """(stats, dX, grads) of the functions under test; dW and dbias start from 1, to be added into."""
    dtype = torch.float64 if rows.hidden.dtype == torch.float64 else torch.float32
    bias = torch.ones(head.weight.shape[0], dtype=dtype) if head.bias is not None else None
    grads = HeadGrads(torch.ones(head.weight.shape, dtype=dtype), bias, True)
    stats = kept_logprobs(head, rows, kept, True, True)
    dx = kept_backward(head, rows, stats, up, grads)
    return stats, dx, HeadGrads(grads.weight - 1, bias - 1 if bias is not None else None, True)


def truth(head, rows, kept, up):
    """The twin in fp64: outputs, and gradients by hidden, weight and, if there is one, bias."""
    leaves, out = twin(head, rows, kept)
    pairs = [(u, x) for u, x in zip(up, (out.logprobs, out.entropy, out.sum_sq), strict=True) if u is not None]
    grads = torch.autograd.grad(sum((u.double() * x).sum() for u, x in pairs), leaves)
    return type(out)(*(x.detach() for x in out)), grads


def differences(found, wanted):
    """Largest absolute error of each output, then relative Frobenius error of each gradient."""
    (stats, dx, grads), (out, exact) = found, wanted
    pairs = (
        (stats.logprobs, out.logprobs),
        (stats.lse, out.lse),
        (stats.entropy, out.entropy),
        (stats.sum_sq, out.sum_sq),
    )
    values = [float((got - want).abs().max()) for got, want in pairs]
    found_grads = [x for x in (dx, grads.weight, grads.bias) if x is not None]
    room = 1e-9  # where every row is sure of its token there is no gradient to be relative to
    return values, [float((x - y).norm() / (y.norm() + room)) for x, y in zip(found_grads, exact, strict=True)]


def singles(t):
    """Rows whose set is the target alone."""
    return torch.tensor([row % 6 in (1, 4, 5) for row in range(t)])
