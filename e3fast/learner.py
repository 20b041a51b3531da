"""The trained policy: model, fp32 masters, optimizer. `update(batch, loss)` is one optimiser step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from csrc_triton import linear_grpo_loss, linear_logprobs
from csrc_triton.losses import TokenLoss
from e3fast.config import TrainConfig
from e3fast.memory import OutOfMemory, PeakMeter, Trial, is_out_of_memory
from e3fast.model import output_head, packed_hidden
from e3fast.objective import token_loss
from e3fast.types import Batch, LossParams, MicroBatch, StepStats

PROBE_STEP = 1.05  # factor on the temperature that the elasticity is measured with


class Learner(Protocol):
    """What the loop asks of a learner; several owners, nothing to inherit."""

    num_ranks: int

    def update(self, batch: Batch, loss: LossParams, probe: bool = False) -> StepStats: ...

    def allocate(self) -> None: ...

    def trial(self, micro_batch: MicroBatch, backward: bool) -> Trial: ...

    def drop_gradients(self) -> None: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass
class Totals:
    """Sums over a step's tokens, fp64: metrics travel as (sum, count), never as means of means."""

    loss: float = 0.0
    entropy: float = 0.0
    entropy_tokens: int = 0
    gap: float = 0.0
    gap_max: float = 0.0
    loss_tokens: int = 0
    clipped: float = 0.0
    ratio_max: float = 0.0
    probe: tuple[float, float] = (math.nan, math.nan)
    tokens: dict[str, int] = field(default_factory=lambda: {"trained": 0, "scored": 0})
    seconds: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"trained": (), "scored": ()})

    def add(self, micro_batch: MicroBatch, rows: Tensor, logprobs: Tensor, entropy: Tensor, kind: str) -> None:
        counted, asked = micro_batch.entropy_mask[rows], micro_batch.loss_mask[rows]
        self.entropy += float(entropy[counted].double().sum())
        self.entropy_tokens += int(counted.sum())
        gap = (logprobs - micro_batch.rollout_logprobs[rows])[asked].abs().double()
        self.gap += float(gap.sum())
        self.gap_max = max(self.gap_max, float(gap.max()) if len(gap) else 0.0)
        self.loss_tokens += len(gap)
        self.tokens[kind] += micro_batch.num_tokens

    def add_loss(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        self.loss += float(loss)
        self.clipped += float(metrics.get("clipped", 0.0))
        self.ratio_max = max(self.ratio_max, float(metrics.get("ratio_max", 0.0)))

    def stats(self, grad_norm: float, stepped: bool, num_classes: int) -> StepStats:
        share = lambda total, count: total / count if count else math.nan  # noqa: E731
        return StepStats(
            loss=self.loss,
            entropy=share(self.entropy, self.entropy_tokens),
            entropy_tokens=self.entropy_tokens,
            num_classes=num_classes,
            entropy_at_one=self.probe[0],
            elasticity=self.probe[1],
            grad_norm=grad_norm,
            ratio_max=self.ratio_max,
            clip_share=share(self.clipped, self.loss_tokens),
            mismatch_mean=share(self.gap, self.loss_tokens),
            mismatch_max=self.gap_max,
            trained_tokens=self.tokens["trained"],
            scored_tokens=self.tokens["scored"],
            trained_seconds=self.seconds["trained"],
            scored_seconds=self.seconds["scored"],
            stepped=stepped,
        )


class LocalLearner:
    """The learner of one process on one device.

    With a bf16 model the optimizer works on fp32 masters: each micro-batch's gradients are added to the masters' in
    fp32 as they appear, and after the step the masters are rounded into the model. An fp32 model is its own master.
    """

    num_ranks = 1

    def __init__(self, model: Any, config: TrainConfig, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.own_masters = all(p.dtype == torch.float32 for p in self.params)
        self.masters = self.params if self.own_masters else [p.detach().float().requires_grad_() for p in self.params]
        if not self.own_masters:
            for param, master in zip(self.params, self.masters, strict=True):
                param.register_post_accumulate_grad_hook(move_gradient(master))
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.steps_done = 0

    def update(self, batch: Batch, loss: LossParams, probe: bool = False) -> StepStats:
        """Forward and backward over all micro-batches, one clipped optimizer step. Without signal nothing changes.

        `probe` also measures, before the step, how the entropy of one micro-batch answers the temperature.
        OutOfMemory where a micro-batch does not fit: the gradients so far are dropped, and nothing has changed.
        """
        totals = Totals()
        scored, trained = batch.forward_only[0], batch.micro_batches[0]
        first = next(iter((*trained, *scored)), None) if probe else None
        self.accumulate(first, scored, trained, token_loss(loss), totals)
        grad_norm, stepped = self.step() if trained else (0.0, False)
        return totals.stats(grad_norm, stepped, output_head(self.model).weight.shape[0])

    def accumulate(
        self,
        probed: MicroBatch | None,
        scored: Sequence[MicroBatch],
        trained: Sequence[MicroBatch],
        formula: TokenLoss,
        totals: Totals,
    ) -> None:
        failed: str | None = None
        try:
            if probed is not None:
                totals.probe = self.probe(to_device(probed, self.device))
            totals.seconds["scored"] = self.timed(lambda m: self.score(m, totals), scored)
            totals.seconds["trained"] = self.timed(lambda m: self.backward(m, formula, totals), trained)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = (str(error).splitlines() or [type(error).__name__])[0]
        if failed is not None:  # only now: the error's traceback held the activations
            self.drop_gradients()
            raise OutOfMemory(failed)

    def timed(self, work: Callable[[MicroBatch], None], micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Seconds of each; on a GPU by events."""
        marks = [mark(self.device)]
        for micro_batch in micro_batches:
            work(to_device(micro_batch, self.device))
            marks.append(mark(self.device))
        return seconds_between(marks, self.device)

    def allocate(self) -> None:
        """Let gradients and optimizer state stand before the first step, so that memory is measured beside them.

        The optimizer steps once with gradients and learning rate 0, and forgets that it did.
        """
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def trial(self, micro_batch: MicroBatch, backward: bool) -> Trial:
        """Seconds and peak memory of one micro-batch; its gradients stay until `drop_gradients`. Can be OutOfMemory."""
        meter, totals = PeakMeter(self.device), Totals()
        meter.start()
        scored, trained = ((), (micro_batch,)) if backward else ((micro_batch,), ())
        self.accumulate(None, scored, trained, token_loss(LossParams()), totals)
        (seconds,) = totals.seconds["trained" if backward else "scored"]
        return Trial(micro_batch.num_tokens, seconds, meter.read())

    def standing_bytes(self) -> dict[str, int]:
        """Bytes of what stands between micro-batches, with gradients and after the first step."""
        size = lambda tensors: sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # noqa: E731
        masters = size(self.masters)
        return {
            "weights": size(self.model.parameters()),
            "masters": 0 if self.own_masters else masters,
            "gradients": masters,
            "optimizer": 2 * masters,
        }

    def drop_gradients(self) -> None:
        """The masters', and what a backward pass that broke off left on the model."""
        self.optimizer.zero_grad(set_to_none=True)
        for param in self.params:
            param.grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch, totals: Totals) -> None:
        """Log-probs and entropy alone, for samples that add nothing to the gradient."""
        rows = torch.nonzero(micro_batch.targets >= 0)[:, 0]
        hidden = packed_hidden(self.model, micro_batch)[rows]
        logprobs, entropy = self.head_pass(hidden, micro_batch.targets[rows], micro_batch.temperatures[rows])
        totals.add(micro_batch, rows, logprobs, entropy, "scored")

    def head_pass(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, (R,) each, from hidden states (R, H)."""
        head = output_head(self.model)
        out = linear_logprobs(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            temperature=temperatures,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            want_entropy=True,
        )
        assert out.entropy is not None
        return out.logprobs, out.entropy

    @torch.no_grad()
    def probe(self, micro_batch: MicroBatch) -> tuple[float, float]:
        """Entropy at temperature 1, and its elasticity by temperature, over the micro-batch's entropy rows."""
        rows = torch.nonzero(micro_batch.entropy_mask)[:, 0]
        hidden, targets = packed_hidden(self.model, micro_batch)[rows], micro_batch.targets[rows]
        tau = micro_batch.temperatures[rows]
        mean = lambda at: float(self.head_pass(hidden, targets, at)[1].double().mean()) if len(rows) else math.nan  # noqa: E731
        plain, hotter, at_one = mean(tau), mean(PROBE_STEP * tau), mean(torch.ones_like(tau))
        usable = plain > 0 and hotter > 0
        return at_one, math.log(hotter / plain) / math.log(PROBE_STEP) if usable else math.nan

    def backward(self, micro_batch: MicroBatch, formula: TokenLoss, totals: Totals) -> None:
        rows = torch.nonzero(micro_batch.loss_weights)[:, 0]  # the head runs only where the loss asks
        head = output_head(self.model)
        out = linear_grpo_loss(
            packed_hidden(self.model, micro_batch)[rows],
            head.weight,
            micro_batch.targets[rows],
            {"advantages": micro_batch.advantages[rows]},
            formula,
            micro_batch.loss_weights[rows],
            bias=head.bias,
            temperature=micro_batch.temperatures[rows],
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            want_entropy=True,
        )
        out.loss.backward()
        assert out.entropy is not None
        totals.add(micro_batch, rows, out.logprobs, out.entropy, "trained")
        totals.add_loss(out.loss.detach(), out.metrics)

    def step(self) -> tuple[float, bool]:
        """Clip once by the global norm, step, round into the model.

        A gradient that is not finite is dropped, not applied.
        """
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return norm, math.isfinite(norm)

    @property
    def learning_rate(self) -> float:
        """Linear warm-up from 0, then constant."""
        warm = self.config.warmup_steps
        return self.config.learning_rate * (min(1.0, (self.steps_done + 1) / warm) if warm else 1.0)

    @torch.no_grad()
    def publish(self) -> None:
        if not self.own_masters:
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its checkpoint name, in the compute type."""
        yield from self.model.named_parameters()

    def state(self) -> dict[str, Any]:
        """Masters, optimizer and step count; tensors are the live ones."""
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict(), "steps_done": self.steps_done}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. ValueError where it belongs to another model."""
        shapes = [tuple(master.shape) for master in self.masters]
        if [tuple(saved.shape) for saved in state["masters"]] != shapes:
            raise ValueError("the checkpoint holds weights of other shapes: it belongs to another model")
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        # load_state_dict brings the old run's knobs along; this run's hold.
        self.optimizer.param_groups[0].update(betas=self.config.betas, weight_decay=self.config.weight_decay)
        self.steps_done = state["steps_done"]
        self.publish()


def move_gradient(master: Tensor) -> Any:
    """Hook that adds a parameter's fresh gradient to its master's in fp32 and frees it."""

    def hook(param: Tensor) -> None:
        assert param.grad is not None
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad += param.grad
        param.grad = None

    return hook


def mark(device: torch.device) -> Any:
    """A point in a device's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: Sequence[Any], device: torch.device) -> tuple[float, ...]:
    if device.type != "cuda":
        return tuple(b - a for a, b in pairwise(marks))
    torch.cuda.synchronize(device)
    return tuple(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    fields = {name: getattr(micro_batch, name).to(device, non_blocking=True) for name in MicroBatch.__slots__}
    return MicroBatch(**fields)
