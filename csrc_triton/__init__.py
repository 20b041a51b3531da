"""Log-probabilities, entropy and policy losses straight from hidden states and the LM head; needs torch only."""

from csrc_triton.grpo_loss import grpo_loss
from csrc_triton.linear_loss import LinearLoss, linear_grpo_loss
from csrc_triton.logprobs import LogProbs, linear_logprobs
from csrc_triton.losses import Chunk, LossTerms, grpo

__all__ = ["Chunk", "LinearLoss", "LogProbs", "LossTerms", "grpo", "grpo_loss", "linear_grpo_loss", "linear_logprobs"]
