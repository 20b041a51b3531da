"""vLLM behind its own HTTP server, on this machine or another: `e3fast serve RUN.toml` starts one.

Weights go through vLLM's weight-transfer interface, whose back end (vllm_receiver.py) fetches them from the learner by
a socket. Every batch is sampled between two looks at the version that the last hand-over left there: a server that was
started anew meanwhile has no weights, and what it answered is thrown away.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from e3fast.rollout.peers import START_FACTOR, PeerDied, PeerFailed
from e3fast.rollout.transfer import serve_once
from e3fast.rollout.vllm_api import Answer, Ask

HELP = "start it by `e3fast serve RUN.toml`"


class ServerPeer:
    def __init__(
        self, url: str, max_model_len: int, max_sequences: int, end_tokens: Sequence[int], deadline: float
    ) -> None:
        """`deadline`: seconds without a byte of an answer after which the server counts as dead."""
        parts = urlsplit(url)
        self.url, self.host, self.port = url, parts.hostname or "", parts.port or 80
        self.max_model_len, self.max_sequences, self.end_tokens = max_model_len, max_sequences, list(end_tokens)
        self.deadline = deadline
        self.model, self.version = "", ""

    def start(self) -> None:
        self.wait()
        model = self.ask("GET", "/v1/models")["data"][0]
        if model["max_model_len"] < self.max_model_len:
            raise PeerFailed(
                f"the server at {self.url} has a context of {model['max_model_len']} tokens, the run needs "
                f"{self.max_model_len} (data.max_prompt_tokens + rollout.max_new_tokens): {HELP}"
            )
        self.model = model["id"]
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def wait(self) -> None:
        end = time.monotonic() + START_FACTOR * self.deadline
        while True:
            try:
                with self.request("GET", "/health") as answer:
                    if answer.status == 200:
                        return
            except (OSError, http.client.HTTPException):
                pass
            if time.monotonic() > end:
                seconds = START_FACTOR * self.deadline
                raise PeerDied(f"no vLLM server at {self.url} within {seconds:.0f} s (rollout.deadline): {HELP}")
            time.sleep(min(1.0, self.deadline))

    def sample(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        self.check_version()
        found, failure = {}, None
        with ThreadPoolExecutor(max_workers=min(len(asks), self.max_sequences)) as pool:
            asked = {pool.submit(self.complete, ask): i for i, ask in enumerate(asks)}
            for future in as_completed(asked):
                try:
                    found[asked[future]] = future.result()
                except PeerDied as error:
                    failure = error
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
        self.check_version()
        yield from found.items()
        if failure:
            raise failure

    def complete(self, ask: Ask) -> Answer:
        """One completion, streamed: each piece is a sign of life."""
        body = {
            "model": self.model,
            "prompt": list(ask.token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": self.end_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        tokens, logprobs, reason = [], [], None
        for choice in self.stream("/v1/completions", body):
            tokens += choice["token_ids"] or []
            logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            reason = choice["finish_reason"] or reason
        if reason not in ("stop", "length") or len(tokens) != len(logprobs):
            raise PeerDied(f"the vLLM server at {self.url} broke off in the middle of a completion")
        return Answer(tuple(tokens), tuple(float("nan") if x is None else float(x) for x in logprobs), reason)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The choices of each server-sent event."""
        try:
            with self.watched("POST", path, body) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        raise PeerFailed(f"the vLLM server at {self.url}: {piece['error']}")
                    yield from piece["choices"]
        except (OSError, http.client.HTTPException) as error:
            raise self.death(error) from None

    def load(self, weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int], policy_version: int) -> None:
        token, self.version = secrets.token_hex(16), f"{policy_version}-{secrets.token_hex(8)}"
        self.ask("POST", "/start_weight_update")
        host = self.own_address()
        with socket.create_server((host, 0)) as listener, ThreadPoolExecutor(max_workers=1) as pool:
            source = [host, listener.getsockname()[1], token, self.deadline]
            info = {"update_info": {"source": source, "checksums": dict(checksums)}}
            update = pool.submit(self.ask, "POST", "/update_weights", info)
            try:
                serve_once(listener, token, weights, self.deadline)
            except OSError as error:
                update.result()  # what the server says of it, if it does
                raise PeerDied(f"the vLLM server at {self.url} did not take the weights: {error}") from None
            update.result()
        self.ask("POST", "/finish_weight_update", {"weight_version": self.version})
        self.ask("POST", "/reset_prefix_cache")

    def own_address(self) -> str:
        """Of this machine, as the server reaches it."""
        try:
            with socket.create_connection((self.host, self.port), self.deadline) as link:
                return link.getsockname()[0]
        except OSError as error:
            raise self.death(error) from None

    def check_version(self) -> None:
        version = self.ask("GET", "/weight_info")["weight_version"]
        if version != self.version:
            raise PeerDied(f"the vLLM server at {self.url} has other weights than it was given: it was started anew")

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        body = {"model": self.model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0}
        answer = self.ask("POST", "/v1/completions", body | {"prompt_logprobs": 0, "ignore_eos": True})
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries, strict=True)]

    def sleep(self) -> None:
        """A server has a machine, or a share of one, to itself."""

    def wake(self) -> None: ...

    def close(self) -> None:
        """It goes on serving: whoever started it ends it."""

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        with self.watched(method, path, body) as answer:
            try:
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise self.death(error) from None
        return json.loads(text) if text.strip() else None

    def watched(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The answer, status 200. PeerDied, PeerFailed."""
        try:
            answer = self.request(method, path, body)
            if answer.status == 200:
                return answer
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise self.death(error) from None
        raise PeerFailed(f"the vLLM server at {self.url} answered {path} with {answer.status}: {text[:500]} ({HELP})")

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.deadline)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
        return connection.getresponse()

    def death(self, error: Exception) -> PeerDied:
        if isinstance(error, TimeoutError):
            what = f"gave no answer for {self.deadline:.0f} s (rollout.deadline)"
        else:
            what = f"is not there: {str(error) or type(error).__name__}"
        return PeerDied(f"the vLLM server at {self.url} {what}")
