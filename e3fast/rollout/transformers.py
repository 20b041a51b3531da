"""Rollouts by transformers' own generation, in the learner's process.

Requests of unequal counts and temperatures go into one batch. A prompt is prefilled once and its key-value cache
repeated for its rollouts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from e3fast.rollout.engine import rollout_key
from e3fast.rollout.sampler import Sampler
from e3fast.streams import uniforms
from e3fast.types import Request, Rollout


class Row(NamedTuple):
    request: int  # index among the requests
    rollout: int  # index within the request


class TransformersEngine:
    """Samples from `model`, which may be the learner's own module: then a hand-over moves nothing."""

    def __init__(self, model: Any, tokenizer: Any, max_sequences: int) -> None:
        self.model, self.tokenizer, self.max_sequences = model, tokenizer, max_sequences
        self.policy_version, self.draw = 0, 0
        self.end_tokens = end_of_sequence(model, tokenizer)
        self.cache_name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[list[Rollout]]:
        rows = [Row(i, j) for i, request in enumerate(requests) for j in range(request.num_rollouts)]
        # Together what is alike: a batch decodes until its longest row ends, and pads prompts to its longest.
        rows.sort(key=lambda row: (requests[row.request].max_new_tokens, len(requests[row.request].engine_ids)))
        done: list[list[Rollout]] = [[] for _ in requests]
        for start in range(0, len(rows), self.max_sequences):
            part = rows[start : start + self.max_sequences]
            for row, rollout in zip(part, self.decode(requests, part), strict=True):
                done[row.request].append(rollout)
        return done

    def decode(self, requests: Sequence[Request], rows: Sequence[Row]) -> Iterator[Rollout]:
        wanted = [requests[row.request] for row in rows]
        ids, mask, cache = self.prefill(wanted)
        longest = max(request.max_new_tokens for request in wanted)
        keys = np.array([rollout_key(requests[row.request], row.rollout) for row in rows], dtype=np.uint64)
        drawn = torch.from_numpy(uniforms(keys[:, None], np.arange(longest)[None, :]))
        temperatures = torch.tensor([request.temperature for request in wanted], device=ids.device)
        sampler = Sampler(temperatures, drawn.to(ids.device))
        with plain_generation(self.model):
            out = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=self.settings(longest),
                logits_processor=[sampler],
                **({} if cache is None else {self.cache_name: cache}),
            )
        tokens = out[:, ids.shape[1] :].tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        for request, ids_, lps in zip(wanted, tokens, logprobs, strict=True):
            yield self.finish(request, ids_[: request.max_new_tokens], lps)

    def prefill(self, wanted: Sequence[Request]) -> tuple[Tensor, Tensor, Any]:
        """Left-padded ids and mask of every row, and the cache of all prompt tokens but the last."""
        from transformers import DynamicCache

        prompts = list({request.engine_ids: None for request in wanted})
        longest = max(map(len, prompts))
        device = self.model.device
        pad = self.end_tokens[0]
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        place = {prompt: i for i, prompt in enumerate(prompts)}
        index = torch.tensor([place[request.engine_ids] for request in wanted], device=device)
        cache = None
        if longest > 1:
            cache = DynamicCache(config=self.model.config)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            self.model.base_model(
                input_ids=ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=positions[:, :-1],
                use_cache=True,
                **{self.cache_name: cache},
            )
            cache.batch_select_indices(index)
        return ids[index], mask[index], cache

    def settings(self, max_new_tokens: int) -> Any:
        """The draw is the sampler's; generate only takes its argmax and watches for the end."""
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_tokens,
            pad_token_id=self.end_tokens[0],
        )

    def finish(self, request: Request, tokens: list[int], logprobs: list[float]) -> Rollout:
        """Cut behind the first end-of-sequence token; without one the completion was stopped by its limit."""
        end = next((t for t, token in enumerate(tokens) if token in self.end_tokens), None)
        kept = tokens if end is None else tokens[: end + 1]
        return Rollout(
            request=request,
            token_ids=tuple(kept),
            text=self.tokenizer.decode(kept, skip_special_tokens=True),
            rollout_logprobs=tuple(logprobs[: len(kept)]),
            finish_reason="length" if end is None else "stop",
            policy_version=self.policy_version,
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int, draw: int = 0) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.policy_version, self.draw = policy_version, draw

    def sleep(self) -> None:
        """Nothing to give back: the model is the learner's, and caches end with their batch."""

    def wake(self) -> None: ...

    def report(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@contextlib.contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Without the generation settings that came with the model.

    generate fills whatever is not set from them, and a repetition penalty or a list of suppressed tokens there would
    sample from another distribution than the one that the learner scores.
    """
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def end_of_sequence(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion, as model and tokenizer name them."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = named if isinstance(named, list) else [named]
    ends = [*ends, tokenizer.eos_token_id]
    found = list(dict.fromkeys(token for token in ends if token is not None))
    if not found:
        raise ValueError(
            "neither model nor tokenizer names an end-of-sequence token; set eos_token_id in generation_config"
        )
    return found
