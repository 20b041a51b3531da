"""Sampling inside transformers' generate: a logits processor that draws each row's token and keeps its log-probability.

Each row has its own temperature and its own random stream, so a completion does not depend on what else is in the
batch. One uniform number a token picks from the distribution's running sum; generate's own draw, which fills a (B, V)
tensor with random numbers on one thread, was the largest single cost of decoding on a CPU.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


class Sampler:
    """`LogitsProcessor` protocol: called with (input_ids, scores) once a token.

    Returns scores whose argmax is the draw.
    """

    def __init__(self, temperatures: Tensor, uniforms: Tensor) -> None:
        self.temperatures = temperatures  # (B,), 0 = greedy
        self.uniforms = uniforms  # (B, max_new_tokens) fp64 in (0, 1)
        self.logprobs: list[Tensor] = []  # one (B,) a token, nats, at the row's temperature (1 where greedy)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        greedy = self.temperatures == 0
        z = scores.float() / torch.where(greedy, 1.0, self.temperatures)[:, None]
        probs = torch.softmax(z, dim=-1)
        token = pick(probs, self.uniforms[:, len(self.logprobs)])
        if bool(greedy.any()):
            token = torch.where(greedy, z.argmax(-1), token)
        at = token[:, None]
        # log softmax at the token: the largest probability is 1 / sum e^(z - max)
        logprob = (z.gather(1, at) - z.amax(-1, keepdim=True) + probs.amax(-1, keepdim=True).log()).clamp(max=0)
        self.logprobs.append(logprob[:, 0])
        return torch.full_like(scores, float("-inf")).scatter_(1, at, 0.0)


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the running sum: the first token whose cumulative probability reaches `uniform`, (B, V), (B,) to (B,).

    In two levels, so that fp64 sums cost little: blocks of 128, then inside the block. Never a token of probability 0.
    """
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double().cumsum(-1)
    target = uniform.to(sums) * sums[:, -1]
    block = torch.searchsorted(sums, target[:, None]).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(len(probs)), block[:, 0]].double().cumsum(-1)
    rest = torch.minimum(target[:, None] - before, inside[:, -1:]).clamp(min=torch.finfo(torch.float64).tiny)
    return block[:, 0] * BLOCK + torch.searchsorted(inside, rest)[:, 0].clamp(max=BLOCK - 1)
