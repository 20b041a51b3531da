"""The plain-PyTorch twin of every op: same name, same signature, full logits, autograd for the backward.

Read this first.

It is the oracle of every test (in fp64) and the baseline of every benchmark. Letters: T tokens, H hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from csrc_triton.linear_loss import LinearLoss
from csrc_triton.logprobs import LogProbs
from csrc_triton.losses import Chunk, TokenLoss


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
) -> Tensor:
    """(T, V) logits over temperature."""
    u = hidden @ weight.T
    if bias is not None:
        u = u + bias
    u = u * logit_scale
    if softcap is not None:
        u = softcap * torch.tanh(u / softcap)
    return u / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    entropy_over: str = "vocab",
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
    max_extra_bytes: int | None = None,
    backend: str = "auto",
) -> LogProbs:
    """log softmax(x W')[target], entropy and sum of squares, the way one would write them first."""
    z = logits(hidden, weight, bias, temperature, logit_scale, softcap)
    ignored = targets == ignore_index
    y = targets.long().masked_fill(ignored, 0)
    over_kept = z
    if kept is not None:
        member = torch.zeros_like(z, dtype=torch.bool)
        for t in range(z.shape[0]):
            member[t, kept[1][kept[0][t] : kept[0][t + 1]].long()] = True
        member.scatter_(1, y[:, None], True)
        over_kept = z.masked_fill(~member, float("-inf"))
    logp = torch.log_softmax(over_kept, -1)
    log_full = logp if entropy_over == "kept" else torch.log_softmax(z, -1)
    log_full = log_full.clamp(min=-1e30)
    row = lambda x: x.masked_fill(ignored, 0.0)  # noqa: E731
    return LogProbs(
        row(logp.gather(1, y[:, None])[:, 0]),
        row(-(log_full.exp() * log_full).sum(-1)) if want_entropy else None,
        row(torch.logsumexp(over_kept, -1)).detach(),
        row(log_full.exp().square().sum(-1)) if want_sum_sq else None,
    )


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_data: Mapping[str, Tensor],
    token_loss: TokenLoss,
    weights: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    want_entropy: bool = False,
    drop_zero_rows: bool = True,
    grad_weight_out: Tensor | None = None,
    loss_scale: Tensor | None = None,
    max_extra_bytes: int | None = None,
    backend: str = "auto",
    sparse_tolerance: float | None = None,
) -> LinearLoss:
    """Weighted sum of a token loss over the live rows; weight gradients go where autograd puts them."""
    live = weights != 0
    scale = temperature[live] if isinstance(temperature, Tensor) else temperature
    out = linear_logprobs(
        hidden[live],
        weight,
        targets[live],
        bias=bias,
        temperature=scale,
        logit_scale=logit_scale,
        softcap=softcap,
        want_entropy=want_entropy,
    )
    seq_ids, num_seqs = None, 0
    if cu_seqlens is not None:
        owner = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff().cpu()).to(hidden.device)
        found, seq_ids = torch.unique(owner[live], return_inverse=True)
        num_seqs = len(found)
    chunk = Chunk({name: value[live] for name, value in token_data.items()}, weights[live], seq_ids, num_seqs)
    terms = token_loss(out.logprobs, out.entropy, chunk)
    metrics = {name: value.max() if name.endswith("_max") else value.sum() for name, value in terms.metrics.items()}
    metrics["num_rows"] = live.sum()
    spread = lambda x: None if x is None else torch.zeros_like(weights, dtype=x.dtype).masked_scatter(live, x.detach())  # noqa: E731
    logprobs = spread(out.logprobs)
    assert logprobs is not None
    return LinearLoss((terms.loss * weights[live]).sum(), logprobs, spread(out.entropy), metrics, live.sum())


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    num_tokens: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss token by token, in a Python loop: an oracle that shares no line with the op."""
    total = logprobs.new_zeros(())
    for t in torch.nonzero(loss_mask)[:, 0].tolist():
        ratio = torch.exp(torch.clamp(logprobs[t] - old_logprobs[t], -20, 20))
        inside = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
        raw = ratio if delta is None else torch.clamp(ratio, max=delta)
        term = -torch.minimum(raw * advantages[t], inside * advantages[t])
        term = term * correction[t] if correction is not None else term
        if beta and ref_logprobs is not None:
            gap = torch.clamp(ref_logprobs[t] - logprobs[t], -20, 20)
            term = term + beta * {"k1": -gap, "k2": gap * gap / 2, "k3": torch.exp(gap) - gap - 1}[kl]
        total = total + term
    return total / num_tokens, {"tokens": loss_mask.sum().to(logprobs.dtype)}
