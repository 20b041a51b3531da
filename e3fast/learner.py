"""The trained policy: model, fp32 masters, optimizer. `update(batch, loss)` is one optimiser step."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from csrc_triton import linear_grpo_loss, linear_logprobs
from csrc_triton.losses import TokenLoss, scope_of
from e3fast import latents
from e3fast.config import TrainConfig
from e3fast.draws import Draws, Perturb
from e3fast.ivon import Ivon, IvonConfig
from e3fast.memory import OutOfMemory, PeakMeter, Trial, is_out_of_memory
from e3fast.model import output_head, packed_hidden
from e3fast.objective import token_loss
from e3fast.stopwatch import mark, seconds_between
from e3fast.totals import Totals, row_ends, segment_of
from e3fast.types import Batch, FloatArray, LossParams, MicroBatch, Prompt, StepStats

PROBE_STEP = 1.05  # factor on the temperature that the elasticity is measured with


class Learner(Protocol):
    """What the loop asks of a learner; several owners, nothing to inherit."""

    num_ranks: int

    def update(
        self, batch: Batch, loss: LossParams, probe: bool = False, perturb: Perturb | None = None
    ) -> StepStats: ...

    @property
    def draw(self) -> int: ...

    def stand_at(self, draw: int, perturb: Perturb | None) -> None: ...

    def logprobs(self, batch: Batch, perturb: Perturb | None) -> dict[int, FloatArray]: ...

    def latents(self, prompts: Sequence[Prompt]) -> FloatArray: ...

    def allocate(self) -> None: ...

    def trial(self, micro_batch: MicroBatch, backward: bool, perturb: Perturb | None = None) -> Trial: ...

    def drop_gradients(self) -> None: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class LocalLearner:
    """The learner of one process on one device.

    With a bf16 model the optimizer works on fp32 masters: each micro-batch's gradients are added to the masters' in
    fp32 as they appear, and after the step the masters are rounded into the model. An fp32 model is its own master.
    """

    num_ranks = 1

    reference: Any = None  # the frozen start model
    latent_matrix: Tensor | None = None  # (H, 256)

    def __init__(self, model: Any, config: TrainConfig, device: torch.device, ivon: IvonConfig | None = None) -> None:
        """`ivon` where train.optimizer is "ivon": its own learning rate and warm-up hold then."""
        self.model, self.config, self.device = model, config, device
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        self.own_masters = all(p.dtype == torch.float32 for p in self.params)
        self.masters = self.params if self.own_masters else [p.detach().float().requires_grad_() for p in self.params]
        if not self.own_masters:
            for param, master in zip(self.params, self.masters, strict=True):
                param.register_post_accumulate_grad_hook(move_gradient(master))
        self.optimizer = Ivon(self.masters, ivon) if ivon else adamw(self.masters, config)
        self.peak = (ivon.lr, ivon.warmup) if ivon else (config.learning_rate, config.warmup_steps)
        self.draws = Draws([name for name, _ in named], self.params, self.masters, self.optimizer)
        self.steps_done = 0

    def keep_reference(self) -> None:
        """Freeze the model as it is now, for losses with a KL term. One more copy of the weights."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def measure_latents(self, seed: int) -> None:
        """From now on each step's stats hold its prompts' latents."""
        self.latent_matrix = latents.projection(seed, output_head(self.model).weight.shape[1], self.device)

    def latents(self, prompts: Sequence[Prompt]) -> FloatArray:
        assert self.latent_matrix is not None
        self.stand_at(0, None)  # a refill asks between two draws
        return latents.of_prompts(self.model, prompts, self.config.tokens_per_micro_batch, self.latent_matrix)

    @property
    def draw(self) -> int:
        """Whose weights the model holds: 0 = the policy's own."""
        return self.draws.draw

    def stand_at(self, draw: int, perturb: Perturb | None) -> None:
        self.draws.stand_at(draw, perturb)

    def update(self, batch: Batch, loss: LossParams, probe: bool = False, perturb: Perturb | None = None) -> StepStats:
        """Forward and backward over all micro-batches, one clipped optimizer step. Without signal nothing changes.

        `probe` also measures, before the step, how the entropy of one micro-batch answers the temperature. Each
        micro-batch is worked out at its draw of weights, made by `perturb`. OutOfMemory where a micro-batch does not
        fit: the gradients so far are dropped, and nothing has changed.
        """
        totals = Totals()
        scored, trained = batch.forward_only[0], batch.micro_batches[0]
        first = next(iter((*trained, *scored)), None) if probe else None
        self.accumulate(first, scored, trained, loss, totals, perturb)
        kept = totals.kept_weight if loss.masked else 1.0
        totals.loss = totals.loss / kept if kept > 0 else 0.0
        grad_norm, stepped = self.step(kept) if trained else (0.0, False)
        latents = {batch.prompt_ids[i]: latent for i, latent in totals.latents.items() if i >= 0}
        return totals.stats(grad_norm, stepped, output_head(self.model).weight.shape[0], latents)

    def accumulate(
        self,
        probed: MicroBatch | None,
        scored: Sequence[MicroBatch],
        trained: Sequence[MicroBatch],
        loss: LossParams,
        totals: Totals,
        perturb: Perturb | None = None,
    ) -> None:
        """Gradients and totals of a step; the model holds the policy's own weights when it returns."""
        failed: str | None = None
        formula = token_loss(loss)
        try:
            if probed is not None:
                self.stand_at(probed.draw, perturb)
                totals.probe = self.probe(to_device(probed, self.device))
            totals.seconds["scored"] = self.timed(lambda m: self.score(m, totals, loss), scored, perturb)
            totals.seconds["trained"] = self.timed(lambda m: self.backward(m, formula, totals), trained, perturb)
            self.draws.gather(perturb)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = (str(error).splitlines() or [type(error).__name__])[0]
        finally:
            self.stand_at(0, None)
        if failed is not None:  # only now: the error's traceback held the activations
            self.drop_gradients()
            raise OutOfMemory(failed)

    def timed(
        self,
        work: Callable[[MicroBatch], None],
        micro_batches: Sequence[MicroBatch],
        perturb: Perturb | None = None,
    ) -> tuple[float, ...]:
        """Seconds of each, without the loading of draws; on a GPU by events."""
        marks = []
        for micro_batch in micro_batches:
            if micro_batch.draw != self.draw:
                self.draws.gather(perturb)
                self.stand_at(micro_batch.draw, perturb)
            marks.append(mark(self.device))
            work(to_device(micro_batch, self.device))
            marks.append(mark(self.device))
        return seconds_between(marks, self.device)[::2]

    def logprobs(self, batch: Batch, perturb: Perturb | None) -> dict[int, FloatArray]:
        """Log-probs of each sample's completion tokens, in order, at the micro-batches' draws; sample -> (C,)."""
        found: dict[int, FloatArray] = {}

        def keep(micro_batch: MicroBatch) -> None:
            rows = torch.nonzero(micro_batch.targets >= 0)[:, 0]
            _, values, _ = self.forward(self.model, micro_batch, rows)
            segments = segment_of(micro_batch, rows)
            owners, counts = torch.unique_consecutive(segments, return_counts=True)
            parts = values.double().cpu().split(counts.tolist())
            found.update(zip(micro_batch.sample_of[owners].tolist(), [p.numpy() for p in parts], strict=True))

        try:
            self.timed(keep, batch.forward_only[0], perturb)
        finally:
            self.stand_at(0, None)
        return found

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

    def trial(self, micro_batch: MicroBatch, backward: bool, perturb: Perturb | None = None) -> Trial:
        """Seconds and peak memory of one micro-batch; its gradients stay until `drop_gradients`. Can be OutOfMemory."""
        meter, totals = PeakMeter(self.device), Totals()
        meter.start()
        scored, trained = ((), (micro_batch,)) if backward else ((micro_batch,), ())
        self.accumulate(None, scored, trained, LossParams(), totals, perturb)
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
    def forward(self, model: Any, micro_batch: MicroBatch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (R, H), log-probs and entropies (R,) of some rows of a micro-batch."""
        hidden = packed_hidden(model, micro_batch)[rows]
        return hidden, *self.head_pass(model, hidden, micro_batch.targets[rows], micro_batch.temperatures[rows])

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch, totals: Totals, loss: LossParams) -> None:
        """Log-probs and entropy alone, for samples that add nothing to the gradient."""
        rows = torch.nonzero(micro_batch.targets >= 0)[:, 0]
        hidden, logprobs, entropy = self.forward(self.model, micro_batch, rows)
        totals.add(micro_batch, rows, logprobs, entropy, "scored")
        self.note_latents(hidden, rows, micro_batch, totals)
        if loss.masked:
            totals.mask_scored(micro_batch, rows, logprobs, loss)

    def note_latents(self, hidden: Tensor, rows: Tensor, micro_batch: MicroBatch, totals: Totals) -> None:
        if self.latent_matrix is not None and len(rows):
            totals.latents |= latents.from_training(hidden, rows, micro_batch, self.latent_matrix)

    def head_pass(self, model: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, (R,) each, from hidden states (R, H)."""
        head = output_head(model)
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
        at_tau = lambda at: self.head_pass(self.model, hidden, targets, at)[1].double()  # noqa: E731
        mean = lambda at: float(at_tau(at).mean()) if len(rows) else math.nan  # noqa: E731
        plain, hotter, at_one = mean(tau), mean(PROBE_STEP * tau), mean(torch.ones_like(tau))
        usable = plain > 0 and hotter > 0
        return at_one, math.log(hotter / plain) / math.log(PROBE_STEP) if usable else math.nan

    def backward(self, micro_batch: MicroBatch, formula: TokenLoss, totals: Totals) -> None:
        rows = torch.nonzero(micro_batch.loss_weights)[:, 0]  # the head runs only where the loss asks
        head = output_head(self.model)
        hidden = packed_hidden(self.model, micro_batch)[rows]
        out = linear_grpo_loss(
            hidden,
            head.weight,
            micro_batch.targets[rows],
            self.token_data(micro_batch, rows),
            formula,
            micro_batch.loss_weights[rows],
            cu_seqlens=row_ends(micro_batch, rows) if scope_of(formula) == "sequence" else None,
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
        self.note_latents(hidden, rows, micro_batch, totals)

    def token_data(self, micro_batch: MicroBatch, rows: Tensor) -> dict[str, Tensor]:
        """What the token loss reads of each row; where all are plain, no routes."""
        data = {n: getattr(micro_batch, n)[rows] for n in ("advantages", "rollout_logprobs")}
        if bool(micro_batch.routes.any()):
            data["routes"] = micro_batch.routes[rows]
        if self.reference is not None:
            data["ref_logprobs"] = self.forward(self.reference, micro_batch, rows)[1]
        return data

    def step(self, kept_weight: float = 1.0) -> tuple[float, bool]:
        """Clip once by the global norm, step, round into the model.

        `kept_weight` is what a mask has left of the loss weights' sum: the rest stands for the whole. A gradient that
        is not finite is dropped, not applied; so is one that nothing is left of.
        """
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        if isinstance(self.optimizer, Ivon):
            self.optimizer.spread()
        grads = [master.grad for master in self.masters if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) / kept_weight if kept_weight > 0 else math.nan
        if math.isfinite(norm):
            self.scale(min(1.0, self.config.max_grad_norm / (norm + 1e-6)) / kept_weight)
            self.optimizer.step()
            self.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return norm, math.isfinite(norm)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor == 1.0:
            return
        for master in self.masters:
            if master.grad is not None:
                master.grad *= factor
        if isinstance(self.optimizer, Ivon):
            self.optimizer.scale(factor)

    @property
    def learning_rate(self) -> float:
        """Linear warm-up from 0, then constant."""
        peak, warm = self.peak
        return peak * (min(1.0, (self.steps_done + 1) / warm) if warm else 1.0)

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
        if not isinstance(self.optimizer, Ivon):
            self.optimizer.param_groups[0].update(betas=self.config.betas, weight_decay=self.config.weight_decay)
        self.steps_done = state["steps_done"]
        self.publish()


def adamw(masters: list[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    knobs: dict[str, Any] = dict(lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
    return torch.optim.AdamW(masters, fused=True, **knobs)


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


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    fields = {name: getattr(micro_batch, name) for name in MicroBatch.__slots__}
    moved = {k: v.to(device, non_blocking=True) for k, v in fields.items() if isinstance(v, Tensor)}
    return dataclasses.replace(micro_batch, **moved)
