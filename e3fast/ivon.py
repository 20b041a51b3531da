"""IVON, a variational optimizer (arXiv 2402.17641): weights are the mean of a Gaussian whose precision it learns.

Per weight, with g the gradient at the draw m + nu and nu the noise of that draw (several draws: averages of g, nu g):

    mom <- b1 mom + (1 - b1) g
    f = ess (nu g) (h + delta)
    h <- b2 h + (1 - b2) f + (1 - b2)^2 (h - f)^2 / (2 (h + delta))
    m <- m - lr (h0 + delta) clip((mom / (1 - b1^t) + delta m) / (h + delta), +-xi)

The standard deviation of a draw is 1 / sqrt(ess (h + delta)). Where gradients are taken at the mean, nu g says nothing
of the curvature: h stays where it started.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IvonConfig:
    ess: float = 1e9  # effective sample size: the larger, the smaller the noise
    hess_init: float = 1e-3  # h0
    prior_precision: float = 1e-6  # delta, also the weight decay
    lr: float = 1.0
    clip_radius: float = 1e-3  # xi
    betas: tuple[float, float] = (0.9, 0.9999)
    warmup: int = 34  # steps


class Ivon(torch.optim.Optimizer):
    """State of a parameter: step, momentum, hess."""

    def __init__(self, params: Iterable[Tensor], config: IvonConfig) -> None:
        super().__init__(params, {"lr": config.lr})
        self.config = config
        self.noise_grads: dict[Tensor, Tensor] = {}  # sum over draws of nu g, of the step under way
        self.drawn_grads: dict[Tensor, Tensor] = {}  # sum over draws of g

    @torch.no_grad()
    def gather(self, param: Tensor, noise: Tensor) -> None:
        """Take a draw's gradient off `param`, with the noise of that draw, before the next draw adds its own."""
        if param.grad is None:
            return
        for sums, part in ((self.noise_grads, noise * param.grad), (self.drawn_grads, param.grad)):
            sums[param] = sums[param] + part if param in sums else part
        param.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Give every parameter the gradient of all its draws."""
        for param, grad in self.drawn_grads.items():
            param.grad = grad if param.grad is None else param.grad + grad
        self.drawn_grads = {}

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """What is done to the gradients (clipping) is done to these."""
        for grad in self.noise_grads.values():
            grad *= factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.noise_grads, self.drawn_grads = {}, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no closures
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, param.grad, group["lr"])

    def step_one(self, param: Tensor, grad: Tensor, lr: float) -> None:
        config, state = self.config, self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(param)
            state["hess"] = torch.full_like(param, config.hess_init)
        (b1, b2), delta = config.betas, config.prior_precision
        momentum, hess = state["momentum"], state["hess"]
        state["step"] += 1
        momentum.mul_(b1).add_(grad, alpha=1 - b1)
        if param in self.noise_grads:
            f = config.ess * self.noise_grads[param] * (hess + delta)
            curve = 0.5 * (1 - b2) ** 2 * (hess - f).square() / (hess + delta)
            hess.copy_(b2 * hess + (1 - b2) * f + curve)
        debiased = momentum / (1 - b1 ** float(state["step"]))
        change = ((debiased + delta * param) / (hess + delta)).clamp(-config.clip_radius, config.clip_radius)
        param.sub_(change, alpha=lr * (config.hess_init + delta))
