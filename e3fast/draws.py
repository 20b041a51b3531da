"""Perturbed weights in a model's parameters, and the policy's own back in their place, bit for bit.

A draw is made in fp32 from the masters and rounded into the parameters; nothing is ever added and taken away again.
Noise is never stored: whoever needs it again makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from e3fast.ivon import Ivon

Perturb = Callable[[int, str, Tensor, Mapping[str, Tensor]], Tensor]
"""(draw, parameter name, its fp32 weight, its optimizer state) -> the weight of that draw; pure."""


class Draws:
    """`draw`: whose weights stand in `params` now; 0 = the policy's own."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        masters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.names, self.params, self.masters, self.optimizer = names, params, masters, optimizer
        self.draw = 0
        self.kept: list[Tensor] | None = None  # the policy's own weights, where the params are their own masters

    @torch.no_grad()
    def stand_at(self, draw: int, perturb: Perturb | None) -> None:
        if draw == self.draw:
            return
        if draw and self.kept is None and self.params is self.masters:
            self.kept = [master.detach().clone() for master in self.masters]
        self.draw = draw  # already now: a draw that breaks off half made is to be taken back
        if draw:
            assert perturb is not None
            for param, weight in zip(self.params, self.drawn(draw, perturb), strict=True):
                param.copy_(weight)
        else:
            for param, weight in zip(self.params, self.own(), strict=True):
                param.copy_(weight)
            self.kept = None

    def own(self) -> Sequence[Tensor]:
        """The policy's own weights, fp32."""
        return self.masters if self.kept is None else self.kept

    def drawn(self, draw: int, perturb: Perturb) -> Iterator[Tensor]:
        for name, master, weight in zip(self.names, self.masters, self.own(), strict=True):
            yield perturb(draw, name, weight.detach(), self.optimizer.state.get(master, {}))

    @torch.no_grad()
    def gather(self, perturb: Perturb | None) -> None:
        """Before another draw adds its gradients: IVON learns its precision from each draw's own times its noise."""
        if not self.draw or not isinstance(self.optimizer, Ivon):
            return
        assert perturb is not None
        for master, own, drawn in zip(self.masters, self.own(), self.drawn(self.draw, perturb), strict=True):
            self.optimizer.gather(master, drawn - own)
