"""Where a prompt stands in the policy's mind: the last hidden state at its end, projected to 256 numbers.

The projection is Gaussian and fixed by the run's seed, so nearness is kept (Johnson-Lindenstrauss). For prompts in a
training batch it costs nothing: the state at the prompt's last token is the one that predicts the completion's first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from e3fast.model import packed_hidden
from e3fast.noise import gaussian
from e3fast.packing import build
from e3fast.streams import stream_key
from e3fast.totals import segment_of
from e3fast.types import FloatArray, MicroBatch, Prompt, Sample

SIZE = 256


def projection(seed: int, width: int, device: torch.device) -> Tensor:
    """(width, 256), entries of variance 1 / 256."""
    noise = gaussian(stream_key(seed, "latents"), width * SIZE, device)
    return noise.view(width, SIZE) / SIZE**0.5


def from_training(hidden: Tensor, rows: Tensor, micro_batch: MicroBatch, matrix: Tensor) -> dict[int, FloatArray]:
    """Latent of each sample of a micro-batch, from the hidden states (R, H) of its asked rows."""
    segments = segment_of(micro_batch, rows)
    owners, counts = torch.unique_consecutive(segments, return_counts=True)
    first = counts.cumsum(0) - counts
    latents = (hidden.detach()[first].float() @ matrix).cpu().numpy().astype(np.float64)
    return dict(zip(micro_batch.sample_of[owners].tolist(), latents, strict=True))


@torch.no_grad()
def of_prompts(model: Any, prompts: Sequence[Prompt], cap: int, matrix: Tensor) -> FloatArray:
    """(n, 256) by prompt-only forward passes of at most `cap` tokens, or one prompt."""
    found = np.zeros((len(prompts), SIZE))
    for part in parts(prompts, cap):
        micro_batch = build([bare(prompts[i]) for i in part], [0.0] * len(part), [(i,) for i in range(len(part))])
        ends = micro_batch.cu_seqlens[1:] - 1
        found[part] = (packed_hidden(model, micro_batch)[ends].float() @ matrix).cpu().numpy()
    return found


def parts(prompts: Sequence[Prompt], cap: int) -> Iterator[list[int]]:
    here, tokens = [], 0
    for i, prompt in enumerate(prompts):
        if here and tokens + len(prompt.token_ids) > cap:
            yield here
            here, tokens = [], 0
        here.append(i)
        tokens += len(prompt.token_ids)
    if here:
        yield here


def bare(prompt: Prompt) -> Sample:
    """A prompt as a sample that asks for nothing."""
    n = len(prompt.token_ids)
    nothing, zeros = np.zeros(n, bool), np.zeros(n)
    ids = np.array(prompt.token_ids, dtype=np.int64)
    return Sample(0, prompt.id, n, ids, nothing, nothing, zeros, zeros, np.ones(n))
