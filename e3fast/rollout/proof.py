"""The policy as the learner has it: what an engine's weights are held against after a hand-over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from csrc_triton import linear_logprobs
from e3fast.attention_plan import AttentionPlan
from e3fast.model import output_head, trunk
from e3fast.rollout.vllm import Proof

PROBE_TOKENS = 64
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # mean |difference|, nats: rounding gives 1e-5 and 0.07 (demo)


def make_proof(model: Any, token_ids: Sequence[int]) -> Proof:
    """By the model's weights as they are when asked. `token_ids`: a natural text of two tokens or more."""

    @torch.no_grad()
    def logprobs(ids: Sequence[int]) -> list[float]:
        row = torch.tensor(ids, device=model.device)
        plan = AttentionPlan(torch.tensor([0, len(ids)], device=model.device), torch.tensor([-1]))
        hidden = trunk(model, row, torch.arange(len(ids), device=model.device), plan)[:-1]
        head = output_head(model)
        out = linear_logprobs(
            hidden, head.weight, row[1:], bias=head.bias, logit_scale=head.logit_scale, softcap=head.softcap
        )
        return out.logprobs.tolist()

    return Proof(model.named_parameters, tuple(token_ids[:PROBE_TOKENS]), logprobs, LIMITS[model.dtype])
