"""One sample at a time, no packing and no kernel: what the learner's numbers must equal."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch


def dense_hidden(model, token_ids):
    """Last hidden states of one sequence alone, (L, H)."""
    ids = torch.as_tensor(np.asarray(token_ids))
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


def dense_rows(model, sample):
    """Log-probs and entropies of a sample's completion tokens, (C,) each, with gradients."""
    p = sample.num_prompt_tokens
    hidden = dense_hidden(model, sample.token_ids)[p - 1 : -1]
    tau = torch.as_tensor(sample.temperatures[p:]).to(hidden)
    logs = torch.log_softmax(model.get_output_embeddings()(hidden) / tau[:, None], -1)
    targets = torch.as_tensor(sample.token_ids[p:])
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def flat_grad(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def routed(sample, route, draw=0, **changes):
    """A sample of another route; rescues count in no entropy."""
    counted = np.zeros_like(sample.entropy_mask) if route == "rescue" else sample.entropy_mask
    return dataclasses.replace(sample, **{"route": route, "draw": draw, "entropy_mask": counted} | changes)


@torch.no_grad()
def near_policy(model, sample, shift):
    """A sample whose recorded log-probs are the model's own less `shift` a token: its ratio is exp(sum of shifts)."""
    recorded = sample.rollout_logprobs.copy()
    shifts = np.resize(np.asarray(shift, dtype=float), int(sample.loss_mask.sum()))
    recorded[sample.loss_mask] = dense_rows(model, sample)[0].numpy() - shifts
    return dataclasses.replace(sample, rollout_logprobs=recorded)
