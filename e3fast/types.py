"""The records that travel through a step: frozen, slotted, whole when made.

Each stage makes the next record (ARCHITECTURE.md section 4). Shapes: L tokens of one sample (prompt + completion),
T tokens of one micro-batch, N segments of one micro-batch. Log-probabilities and entropies are in nats.
This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Verdict = Literal["correct", "truncated", "unparsable", "wrong", "failed"]
VERDICTS: tuple[Verdict, ...] = ("correct", "truncated", "unparsable", "wrong", "failed")
FinishReason = Literal["stop", "length"]
Route = Literal["plain", "draw", "rescue"]
ROUTES: tuple[Route, ...] = ("plain", "draw", "rescue")  # MicroBatch.routes holds indices of these
Messages = tuple[dict[str, str], ...]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the data set. `id` is stable and unique; `row` counts 0..N_D-1 and indexes per-prompt state."""

    id: str
    row: int
    token_ids: tuple[int, ...]
    messages: Messages
    answer: str
    source: str


@dataclass(frozen=True, slots=True)
class Request:
    """An order to the engine: `num_rollouts` completions of one prompt at one temperature. Makes one group.

    Completion j has the random stream (seed, first_rollout + j): a request that is split samples the same completions.
    """

    prompt: Prompt
    num_rollouts: int
    temperature: float
    max_new_tokens: int
    seed: int  # 64-bit key of the request's random stream
    kind: Literal["first", "extra"] = "first"
    first_rollout: int = 0
    draw: int = 0  # the weights to sample with: 0 = the policy's own, d = its d-th draw of perturbed ones
    prefixed_ids: tuple[int, ...] = ()  # the prompt's tokens with words put around it, for the engine alone

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """The tokens the engine samples behind. The loss is always taken behind the prompt's own."""
        return self.prefixed_ids or self.prompt.token_ids

    @property
    def route(self) -> Route:
        return "rescue" if self.kind == "extra" else "draw" if self.draw else "plain"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. `token_ids` come from the engine and are never re-encoded; `text` serves rewards only."""

    request: Request
    token_ids: tuple[int, ...]  # the completion, end-of-sequence token included when there is one
    text: str
    rollout_logprobs: tuple[float, ...]  # the engine's, at its temperature, one a completion token
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward says of a rollout: the value to learn from, and one of five verdicts that are never merged."""

    value: float
    verdict: Verdict
    parts: Mapping[str, float] = field(default_factory=dict)


Reward = Callable[[Prompt, Rollout], Score]


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one request with their scores.

    `stats_rewards`, if set, give mean and deviation instead of its own.
    """

    id: int
    request: Request
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    stats_rewards: tuple[float, ...] | None = None

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def counts(self) -> tuple[int, int]:
        """(n, c): rollouts with a verdict, and the correct ones among them."""
        verdicts = [score.verdict for score in self.scores]
        return len(verdicts) - verdicts.count("failed"), verdicts.count("correct")

    @property
    def pass_rate(self) -> float | None:
        """Correct over judged rollouts; None where every rollout failed."""
        judged, correct = self.counts
        return correct / judged if judged else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as training data. Entry t of each array belongs to token t; prompt tokens have mask 0."""

    group: int
    prompt_id: str
    num_prompt_tokens: int
    token_ids: IntArray  # (L,)
    loss_mask: BoolArray  # (L,)
    entropy_mask: BoolArray  # (L,) tokens that count in the step's entropy
    advantages: FloatArray  # (L,)
    rollout_logprobs: FloatArray  # (L,)
    temperatures: FloatArray  # (L,)
    route: Route = "plain"
    draw: int = 0  # the weights it was sampled with

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def has_signal(self) -> bool:
        """Whether any loss token has a non-zero advantage."""
        return bool(self.advantages[self.loss_mask].any())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Segments laid end to end. Entry t holds the data of `targets[t]`, the token that position t predicts.

    A segment is a whole sample, the shared prefix of some samples, or one sample's suffix behind such a prefix.
    """

    token_ids: torch.Tensor  # (T,) int64
    targets: torch.Tensor  # (T,) int64, -100 where a segment ends or nothing is asked
    position_ids: torch.Tensor  # (T,) int64
    loss_mask: torch.Tensor  # (T,) bool
    loss_weights: torch.Tensor  # (T,) fp32: mask times the global normaliser
    entropy_mask: torch.Tensor  # (T,) bool
    advantages: torch.Tensor  # (T,) fp32
    rollout_logprobs: torch.Tensor  # (T,) fp32
    temperatures: torch.Tensor  # (T,) fp32
    cu_seqlens: torch.Tensor  # (N+1,) int64, from 0 to T
    prefix_of: torch.Tensor  # (N,) int64: segment that holds this one's prefix, -1 for none
    sample_of: torch.Tensor  # (N,) int64: index of the sample, -1 for a prefix or filler
    routes: torch.Tensor  # (T,) int8: index into ROUTES
    draw: int = 0  # the weights it is scored and trained at

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Cost of a micro-batch: c0 + a T + head C + b Q + window_b Q_w, in any one unit (FLOP, seconds).

    T tokens laid out, C completion tokens among them, Q the sum of squared lengths: L^2 for a sample alone, and
    q^2 + sum((q + u)^2 - q^2) for suffixes of u tokens behind a shared prefix of q. Q_w is the same sum with
    L^2 replaced by 2 L w - w^2 where L exceeds the sliding window w.
    """

    c0: float
    a: float
    b: float
    head: float = 0.0
    window_b: float = 0.0
    window: int = 0


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Where every sample goes: `bins[rank][slot]` lists fragments, each a tuple of sample indices behind one prefix."""

    num_ranks: int
    cap: int
    coefficients: Coefficients
    bins: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]  # an empty one is filler
    tokens: tuple[tuple[int, ...], ...]  # [rank][slot] laid out: prefixes once a fragment; 1 in a bin of filler
    costs: tuple[tuple[float, ...], ...]  # [rank][slot] without c0
    unshared_tokens: int  # what the same samples and filler would take without prompt sharing, and cost
    unshared_cost: float
    digest: str  # of lengths, groups, ranks, cap, coefficients and placement

    @property
    def num_slots(self) -> int:
        return len(self.bins[0]) if self.bins else 0

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.tokens))


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimiser step for all ranks. `micro_batches[rank][slot]`: the same number of slots on every rank.

    Samples without signal add nothing to the gradient: they stand in `forward_only`, for their entropy alone.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    forward_only: tuple[tuple[MicroBatch, ...], ...]
    prompt_ids: tuple[str, ...]  # of each sample
    num_loss_tokens: int  # over all ranks, as are the next two
    num_sequences: int
    num_groups: int
    plan: PackingPlan
    forward_plan: PackingPlan


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss a run asks for."""

    aggregation: Literal["token", "sequence", "group", "constant"] = "token"
    """How token losses are summed.

    Mean over tokens (DAPO), sequences (GRPO), prompts, or over a constant length (Dr. GRPO).
    """
    group_weight: Literal["token", "prompt"] = "token"
    """With aggregation "token".

    Every token weighs the same, or every prompt does (weight mean group size / group size).
    """
    clip_low: float = 0.2
    """Lower clip of the ratio to the policy that sampled, as 1 - clip_low. It acts once that ratio leaves 1."""
    clip_high: float = 0.2
    """Upper clip of the ratio, as 1 + clip_high."""
    beta: float = 0.0
    """Weight of KL(policy || start model), estimated by k3, in the loss; 0 = none, and no second model in memory."""
    entropy_bonus: float = 0.0
    """Weight of the token entropy in the loss; 0 = none."""
    importance_sampling: Literal["auto", "off", "token", "sequence"] = "auto"
    """Correction for an engine whose log-probs are not quite the learner's.

    Each row's loss is weighted by the ratio learner / engine of its token, or of its whole completion, truncated at
    importance_cap. "auto": off for transformers, token for vLLM.
    """
    importance_cap: float = 2.0
    """Largest such weight."""
    importance_band: float = 0.0
    """Tokens (or completions) whose ratio is outside [1/band, band] leave loss and normaliser; 0 = none do."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("loss.aggregation", self.aggregation, ("token", "sequence", "group", "constant")),
            ("loss.group_weight", self.group_weight, ("token", "prompt")),
            ("loss.importance_sampling", self.importance_sampling, ("auto", "off", "token", "sequence")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name, clip, high in (("clip_low", self.clip_low, 1.0), ("clip_high", self.clip_high, float("inf"))):
            if not 0 < clip <= high:
                raise ValueError(f"loss.{name} must be in (0, {high}], got {clip}")
        for name in ("beta", "entropy_bonus"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"loss.{name} must be >= 0, got {getattr(self, name)}")
        if not 1 <= self.importance_cap < float("inf"):
            raise ValueError(f"loss.importance_cap must be in [1, inf), got {self.importance_cap}")
        if self.importance_band and not 1 < self.importance_band < float("inf"):
            raise ValueError(f"loss.importance_band must be 0 or in (1, inf), got {self.importance_band}")
        if self.group_weight == "prompt" and self.aggregation != "token":
            raise ValueError(f"loss.group_weight 'prompt' needs loss.aggregation 'token', got {self.aggregation!r}")


@dataclass(frozen=True, slots=True)
class LossParams(LossConfig):
    """The loss of one step: the run's own, as methods have changed it in `tune`."""

    rescue_shape: float = 0.0  # c > 0: rescue rows get -A r/(r + c) in place of the clipped loss
    seq_mask: float | None = None  # c: a drawn sequence stays iff its ratio is in [1/c, c]
    gradient_at: Literal["mean", "draw"] = "mean"  # the weights that drawn rows are trained at
    behaviour_logprobs: Literal["engine", "learner"] = "engine"  # whose log-probs a drawn row's ratio is to

    @property
    def needs_every_row(self) -> bool:
        """Whether rows of advantage 0 have a gradient too."""
        return self.beta > 0 or self.entropy_bonus > 0

    @property
    def corrected(self) -> bool:
        """Whether rows are weighted by learner / engine ratios."""
        return self.importance_sampling in ("token", "sequence")

    @property
    def masked(self) -> bool:
        """Whether rows can leave loss and normaliser."""
        return self.seq_mask is not None or (self.corrected and self.importance_band > 0)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the learner measured while it updated."""

    loss: float
    entropy: float  # nats per token over the entropy mask, at the tokens' own temperatures; nan without tokens
    entropy_tokens: int
    num_classes: int  # V, the width of the logits that entropy is over
    entropy_at_one: float  # at temperature 1, over one micro-batch; nan in steps without a probe
    elasticity: float  # d ln entropy / d ln temperature, over the same; nan in steps without a probe
    grad_norm: float
    ratio_max: float
    clip_share: float
    mismatch_mean: float  # mean |policy - engine| log-prob over loss tokens, before the update
    mismatch_max: float
    mismatch_kl: float  # mean k3 estimate of KL(engine || policy) over the same tokens
    effective_sample_share: float  # (sum w)^2 / (n sum w^2) of their ratios w = policy / engine, in (0, 1]
    importance_capped: float  # share of trained loss tokens whose weight was truncated; nan without a correction
    importance_kept: float  # share of the loss weight that the masking band kept; nan without one
    kl: float  # mean k3 estimate to the start model over trained loss tokens; nan without one
    keep_rate: float  # share of drawn sequences that the sequence mask kept; nan without a mask
    trained_tokens: int  # laid out in micro-batches with a backward pass
    scored_tokens: int  # laid out in forward-only micro-batches
    stepped: bool  # False where no sample had signal and nothing changed
    trained_seconds: tuple[float, ...] = field(compare=False)  # of each slot with a backward pass
    scored_seconds: tuple[float, ...] = field(compare=False)  # of each forward-only slot
    latents: Mapping[str, FloatArray] = field(default_factory=dict, compare=False)  # by prompt id, (256,)


@dataclass(slots=True)
class StepContext:
    """What methods may know of the step under way.

    The one record that is written as the step goes on, by the trainer only.

    A clean count (n, c) of a prompt: judged and correct rollouts of its first requests this step.
    Every difficulty statistic reads `clean` and nothing else.
    """

    seed: int
    step: int  # 0-based
    max_steps: int
    num_prompts: int  # N_D, the pool's size
    prompts_per_step: int
    rollouts_per_prompt: int
    visits: int  # prompts drawn so far, this step's included
    need: int  # prompts asked of the pool in the draw under way
    refill: Callable[[int], list[Request]]  # n new prompts of kind "first", this step's excluded
    regrouped: Callable[[list[Group]], list[Group]]  # preview of every regroup hook
    encode: Callable[[Messages], tuple[int, ...]]  # chat messages as prompt tokens; ValueError where refused
    latents: Callable[[Sequence[Prompt]], FloatArray]  # (n, 256): last hidden state at the prompt's end, projected
    max_prompt_tokens: int = 0  # of a prompt with whatever is put around it
    round: int = 0
    pending: int = 0  # requests that methods before this one asked for in this round
    clean: dict[str, tuple[int, int]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # prompt id -> row, for the prompts of `clean`

    @property
    def clean_accuracy(self) -> float | None:
        """Mean over the step's prompts of c/n; None where no rollout was judged."""
        rates = [correct / judged for judged, correct in self.clean.values() if judged]
        return sum(rates) / len(rates) if rates else None
