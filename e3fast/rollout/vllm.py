"""Rollouts by vLLM, on weights that are proven to be the policy's.

After each hand-over a few tensors' checksums must be the learner's, and so must the log-probs of a fixed sequence: no
completion is sampled before. An engine that dies in the middle of a batch is started again, gets the weights of now,
and is asked for what is missing; nothing that is missing is ever scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from e3fast.rollout.engine import EngineError, rollout_key
from e3fast.rollout.peers import Peer, PeerDied, PeerFailed
from e3fast.rollout.transfer import checksums
from e3fast.rollout.vllm_api import Answer, Ask
from e3fast.types import Request, Rollout

MAX_RESTARTS = 3  # without a single completion between them


@dataclass(frozen=True)
class Proof:
    """What a hand-over is held against: the policy as the learner has it."""

    weights: Callable[[], Iterable[tuple[str, Tensor]]]  # of now
    token_ids: tuple[int, ...]  # the probe
    logprobs: Callable[[Sequence[int]], list[float]]  # of its tokens but the first, at temperature 1
    limit: float  # largest mean |difference| of them, nats


class VllmEngine:
    """`peer` is one vLLM, in a process of this machine or behind a server."""

    def __init__(self, peer: Peer, proof: Proof, tokenizer: Any, max_model_len: int) -> None:
        self.peer, self.proof, self.tokenizer, self.max_model_len = peer, proof, tokenizer, max_model_len
        self.policy_version, self.draw = 0, 0
        self.num_restarts = 0
        self.figures: dict[str, float] = {}

    def start(self) -> None:
        """Wait until vLLM is up, and hand the policy's weights over. EngineError."""
        self.phase("start", self.peer.start, '; rollout.engine = "transformers" needs no vLLM')
        self.hand_over(self.proof.weights())

    def generate(self, requests: Sequence[Request]) -> list[list[Rollout]]:
        for request in requests:
            self.check_length(request)
        rows = [(i, j) for i, request in enumerate(requests) for j in range(request.num_rollouts)]
        answers = self.sample([make_ask(requests[i], j) for i, j in rows])
        done: list[list[Rollout]] = [[] for _ in requests]
        for (i, _), answer in zip(rows, answers, strict=True):
            done[i].append(self.rollout(requests[i], answer))
        return done

    def sample(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them, through any number of deaths that leave some progress."""
        found: dict[int, Answer] = {}
        deaths = 0
        while missing := [i for i in range(len(asks)) if i not in found]:
            before = len(found)
            try:
                for at, answer in self.peer.sample([asks[i] for i in missing]):
                    found[missing[at]] = answer
            except PeerFailed as error:
                raise EngineError(f"sampling: vLLM failed: {error}") from None
            except PeerDied as error:
                deaths = 1 if len(found) > before else deaths + 1
                if deaths >= MAX_RESTARTS:
                    raise EngineError(f"sampling: {error}; {deaths} times in a row: the batch cannot be done") from None
                self.restart(error)
        return [found[i] for i in range(len(asks))]

    def restart(self, error: PeerDied) -> None:
        print(f"{error}: starting it again, and asking for what is missing", flush=True)
        self.num_restarts += 1
        self.start()

    def check_length(self, request: Request) -> None:
        length = len(request.engine_ids) + request.max_new_tokens
        if length > self.max_model_len:
            raise ValueError(
                f"a prompt of {len(request.engine_ids)} tokens and up to {request.max_new_tokens} new ones exceed the "
                f"engine's context of {self.max_model_len} tokens: data.max_prompt_tokens + rollout.max_new_tokens"
            )

    def rollout(self, request: Request, answer: Answer) -> Rollout:
        return Rollout(
            request=request,
            token_ids=answer.token_ids,
            text=self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True),
            rollout_logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            policy_version=self.policy_version,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int, draw: int = 0) -> None:
        self.policy_version, self.draw = policy_version, draw
        self.hand_over(weights)

    def hand_over(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        started = time.perf_counter()
        named = [(name, tensor.detach()) for name, tensor in weights]
        self.phase("weights", lambda: self.peer.load(named, checksums(named), self.policy_version))
        got = self.phase("probe", lambda: self.peer.probe(self.proof.token_ids))
        self.check_probe(got)
        self.figures["handover_seconds"] = time.perf_counter() - started

    def check_probe(self, got: Sequence[float]) -> None:
        gaps = [abs(a - b) for a, b in zip(got, self.proof.logprobs(self.proof.token_ids), strict=True)]
        mean = sum(gaps) / len(gaps)
        self.figures |= {"probe_mean": mean, "probe_max": max(gaps)}
        if not mean <= self.proof.limit:
            raise EngineError(
                f"probe: after the hand-over of version {self.policy_version} vLLM's log-probs differ from the "
                f"learner's by {mean:.3g} nats a token (at most {self.proof.limit:g}): it does not hold these weights. "
                'This architecture may not reload in this version of vLLM; rollout.engine = "transformers" does'
            )

    def phase(self, name: str, work: Callable[[], Any], advice: str = "") -> Any:
        """EngineError that says in which phase of a hand-over vLLM failed or died."""
        try:
            return work()
        except (PeerDied, PeerFailed) as error:
            raise EngineError(f"{name}: {error}{advice}") from None

    def sleep(self) -> None:
        self.phase("sleep", self.peer.sleep)

    def wake(self) -> None:
        self.phase("wake", self.peer.wake)

    def report(self) -> dict[str, float]:
        return {f"engine/{name}": value for name, value in self.figures.items()} | {
            "engine/restarts": self.num_restarts
        }

    def close(self) -> None:
        self.peer.close()


def make_ask(request: Request, index: int) -> Ask:
    """vLLM's seeds are of 63 bits."""
    return Ask(request.engine_ids, request.temperature, request.max_new_tokens, rollout_key(request, index) >> 1)
