"""Inputs that tell a right kernel from a wrong one: never flat softmaxes alone."""

import torch

from csrc_triton import reference


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs(t=37, h=24, v=101, dtype=torch.float64, seed=0, gap=4.0):
    """hidden (T, H), weight (V, H), targets (T,) and a source of numbers; `gap` is the spread of a row's logits."""
    draw = draws(seed)
    hidden, weight = draw(t, h), draw(v, h) * gap / h**0.5
    targets = torch.randint(0, v, (t,), generator=torch.Generator().manual_seed(seed + 1))
    return hidden.to(dtype), weight.to(dtype), targets, draw


def peaked(t, h, v, dtype, seed=0):
    """Half the rows put their mass on their target, by gaps from 0 to 60: entropies from log V down to nothing."""
    hidden, weight, targets, draw = inputs(t, h, v, torch.float64, seed, gap=1.0)
    towards = weight[targets] / weight[targets].square().sum(-1, keepdim=True)
    gaps = torch.linspace(0, 60, t, dtype=torch.float64)[:, None] * (torch.arange(t)[:, None] % 2)
    return (hidden + gaps * towards).to(dtype), weight.to(dtype), targets, draw


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


def twin(head, rows, kept=None):
    """fp64 leaves (hidden, weight and, if there is one, bias), and every output that the twin makes of them."""
    leaves = [x.double().requires_grad_() for x in (rows.hidden, head.weight, head.bias) if x is not None]
    out = reference.linear_logprobs(
        leaves[0],
        leaves[1],
        rows.targets,
        bias=leaves[2] if head.bias is not None else None,
        temperature=rows.temperature.double(),
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        kept=kept,
        entropy_over="vocab" if kept is None else "kept",
        want_entropy=True,
        want_sum_sq=True,
    )
    return leaves, out
