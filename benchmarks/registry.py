"""The contestants of benchmarks.kernels: one clipped policy loss over T tokens, each by its own route.

A provider takes a `Problem` whose hidden and weight are leaves and returns the scalar loss
sum_t weights_t * -min(r_t A_t, clip(r_t) A_t); the benchmark calls backward on it. Peers that offer log-probabilities
get the same loss on vectors.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton import grpo, grpo_loss, linear_grpo_loss, linear_logprobs

CLIP, TEMPERATURE = 0.2, 1.0


@dataclass(frozen=True)
class Case:
    """T tokens in sequences of `length`; `dropped` percent of the rows have advantage zero."""

    tokens: int
    width: int
    vocab: int
    length: int
    dropped: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.device}-T{self.tokens}-H{self.width}-V{self.vocab}"


class Problem(NamedTuple):
    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (T,)
    advantages: Tensor  # (T,) one value a sequence
    old_logprobs: Tensor  # (T,)
    length: int

    @property
    def weights(self) -> Tensor:
        return torch.full_like(self.advantages, 1 / self.advantages.shape[0])


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Made-up rows of every kind, from flat to sure of their target."""
    draw = torch.Generator(case.device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, device=case.device)  # noqa: E731
    weight = (normal(case.vocab, case.width) * 0.05).to(case.dtype)
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=draw, device=case.device)
    # the target's logit stands about log V above the others' level, sometimes more, sometimes less
    gaps = (torch.tensor(float(case.vocab)).log() + 3 * normal(case.tokens, 1)).clamp(min=0)
    direction = weight[targets].float()
    hidden = normal(case.tokens, case.width) + gaps * direction / direction.square().sum(-1, keepdim=True)
    return with_rewards(hidden.to(case.dtype), weight, targets, case, seed)


def with_rewards(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case, seed: int = 0) -> Problem:
    """One advantage a sequence, then exactly `dropped` percent of the rows set to zero.

    Old log-probabilities are at most 0.1 nats off the present ones: no row clips, so that no other row has coefficient
    zero and every provider has the same work.
    """
    draw = torch.Generator(case.device).manual_seed(seed + 1)
    scores = torch.randn(case.tokens // case.length, generator=draw, device=case.device)
    advantages = scores.repeat_interleave(case.length)
    order = torch.randperm(case.tokens, generator=draw, device=case.device)
    advantages[order[: round(case.tokens * case.dropped / 100)]] = 0
    noise = 0.2 * torch.rand(case.tokens, generator=draw, device=case.device) - 0.1
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, targets).logprobs + noise
    return Problem(hidden, weight, targets, advantages, old, case.length)


def on_vectors(logprobs: Tensor, problem: Problem) -> Tensor:
    ratio = (logprobs.float() - problem.old_logprobs).exp()
    a = problem.advantages
    return (-torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a) * problem.weights).sum()


def naive(p: Problem) -> Tensor:
    """As trainers do without a fused head: bf16 logits, raised to fp32, over temperature, log-softmax, gather."""
    logits = (p.hidden @ p.weight.T).float() / TEMPERATURE
    return on_vectors(torch.log_softmax(logits, -1).gather(1, p.targets[:, None])[:, 0], p)


def e3fast(p: Problem, **options: Any) -> Tensor:
    data = {"advantages": p.advantages, "old_logprobs": p.old_logprobs}
    return linear_grpo_loss(p.hidden, p.weight, p.targets, data, grpo, p.weights, **options).loss


def e3fast_logprobs(p: Problem, **options: Any) -> Tensor:
    logprobs = linear_logprobs(p.hidden, p.weight, p.targets, **options).logprobs
    mask = torch.ones_like(p.targets, dtype=torch.bool)
    return grpo_loss(logprobs, p.old_logprobs, p.advantages, mask, num_tokens=float(mask.numel()))[0]


def trl_fused_head(p: Problem) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    out = ChunkedLogProbFunction.apply(
        p.hidden, p.weight, None, p.targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ()
    )
    return on_vectors(out[0], p)  # pyright: ignore[reportOptionalSubscript]


def trl_selective(p: Problem) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return on_vectors(selective_log_softmax(p.hidden @ p.weight.T, p.targets), p)


@functools.cache
def liger_module() -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", temperature=1.0)


def liger_chunked_grpo(p: Problem) -> Tensor:
    """One advantage a sequence, zero rows or not; all of one length: a mean over sequences is one over tokens."""
    split = lambda x: x.view(-1, p.length, *x.shape[1:])  # noqa: E731
    mask = torch.ones_like(split(p.targets))
    out = liger_module()(
        split(p.hidden), p.weight, split(p.targets), mask, p.advantages[:: p.length],
        old_per_token_logps=split(p.old_logprobs),
    )  # fmt: skip
    return out[0]


def chunk_loss(x: Tensor, w: Tensor, targets: Tensor, advantages: Tensor, old: Tensor, weights: Tensor) -> Tensor:
    logits = (x @ w.T).float()
    logprobs = logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, -1)
    ratio = (logprobs - old).exp()
    return (-torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages) * weights).sum()


@functools.cache
def compiled_chunk() -> Any:
    return torch.compile(torch.func.grad_and_value(chunk_loss, argnums=(0, 1)), dynamic=False)


class CompiledChunks(torch.autograd.Function):
    """What a good engineer writes in an hour: torch.compile over token chunks, gradients formed at once, fp32 dW."""

    ROWS = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, p: Problem) -> Tensor:
        dx, dw = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        rows = CompiledChunks.ROWS if hidden.device.type == "cpu" else 4096
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            at = slice(start, start + rows)
            vectors = (p.targets[at], p.advantages[at], p.old_logprobs[at], p.weights[at])
            (dx[at], part), value = compiled_chunk()(hidden[at].detach(), weight.detach(), *vectors)
            dw += part
            loss += value
        ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        return dx * scale[0].to(dx.dtype), dw * scale[0].to(dw.dtype), None


def compiled_chunks(p: Problem) -> Tensor:
    return CompiledChunks.apply(p.hidden, p.weight, p)  # pyright: ignore[reportReturnType]


@functools.cache
def flsce_group() -> Any:
    """Liger's native library runs in a process group; one of this process alone, for the largest case measured."""
    import torch.distributed as dist
    from liger_cute_kernels import FusedLinearCrossEntropyConfig, configure  # pyright: ignore[reportMissingImports]

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    configure(flsce=FusedLinearCrossEntropyConfig(max_tokens=65536, hidden_size=4096, local_vocab_size=151936))
    return dist.group.WORLD


def liger_flsce(p: Problem) -> Tensor:
    """Liger's CuTe kernel for Hopper: negative log-likelihood a token."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction as flsce  # pyright: ignore

    return on_vectors(-flsce.apply(p.hidden, p.weight, p.targets, flsce_group()), p)


def cce(p: Problem) -> Tensor:
    """Apple's cut cross-entropy, gradient filter off."""
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return on_vectors(-linear_cross_entropy(p.hidden, p.weight, p.targets, reduction="none", filter_eps=None), p)


@dataclass(frozen=True)
class Provider:
    name: str
    run: Callable[[Problem], Tensor]
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: str = ""  # a package
    fp32_weight_grad: bool = False  # adds the weight gradient up in fp32: those bytes are the gradient, not extra

    def available(self, device: str) -> bool:
        return device in self.devices and (not self.needs or importlib.util.find_spec(self.needs) is not None)


PROVIDERS = (
    Provider("naive", naive),
    Provider("e3fast", e3fast, fp32_weight_grad=True),
    Provider("e3fast sparse 0.05", functools.partial(e3fast, sparse_tolerance=0.05), ("cpu",), fp32_weight_grad=True),
    Provider("e3fast logprobs", e3fast_logprobs, fp32_weight_grad=True),
    Provider("compiled chunks", compiled_chunks, fp32_weight_grad=True),
    Provider("trl fused head", trl_fused_head, needs="trl", fp32_weight_grad=True),
    Provider("trl selective", trl_selective, needs="trl"),
    Provider("liger chunked grpo", liger_chunked_grpo, needs="liger_kernel"),
    Provider("liger flsce", liger_flsce, ("cuda",), needs="liger_cute_kernels"),
    Provider("cce", cce, ("cuda",), needs="cut_cross_entropy"),
)
