"""A vLLM at the other end of a pipe: started, asked and watched. No vLLM is imported here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from e3fast.rollout.transfer import BUFFER_BYTES, send_shared
from e3fast.rollout.vllm_api import Answer, Ask, EngineSettings
from e3fast.rollout.vllm_host import host

START_FACTOR = 5  # a start may be silent this many times longer than anything else
SPIN_COUNT = "20000"  # of an idle OpenMP thread in vLLM's process: its operations follow each other closely (LOG.md)


@contextlib.contextmanager
def spinning(count: str) -> Iterator[None]:
    """For the processes started inside. GOMP reads it when torch is loaded, before any line of ours runs there."""
    before = os.environ.get("GOMP_SPINCOUNT")
    os.environ["GOMP_SPINCOUNT"] = count
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT")
        if before is not None:
            os.environ["GOMP_SPINCOUNT"] = before


class PeerDied(Exception):
    """The peer ended, or gave no sign of life within the deadline. Says which, and where to read more."""


class PeerFailed(Exception):
    """The peer is there and refuses: its own words."""


class Peer(Protocol):
    def start(self) -> None:
        """Ready when it returns; also after a death. PeerDied, PeerFailed."""
        ...

    def sample(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        """Index among `asks` and its answer, as they end. PeerDied in the middle leaves the rest to be asked again."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int], policy_version: int) -> None:
        """PeerFailed where a checksum differs."""
        ...

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of every token but the first."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ProcessPeer:
    """vLLM in a child process; `target` is what runs there."""

    def __init__(
        self, settings: EngineSettings, log: Path, deadline: float, target: Callable[..., None] = host
    ) -> None:
        """`deadline`: seconds without a sign of life after which the process counts as dead, and is killed."""
        self.settings, self.log, self.deadline, self.target = settings, log, deadline, target
        self.process: Any = None
        self.conn: Connection | None = None

    def start(self) -> None:
        self.kill()
        context = torch.multiprocessing.get_context("spawn")
        self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8).share_memory_()
        self.conn, theirs = context.Pipe()
        arguments = (theirs, self.buffer, self.settings, self.log)
        self.process = context.Process(target=self.target, args=arguments, daemon=True, name="vllm")
        with spinning(SPIN_COUNT):
            self.process.start()
        theirs.close()
        self.answer(self.deadline * START_FACTOR)

    def sample(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        self.send(("sample", list(asks)))
        while (message := self.receive())[0] != "done":
            if message[0] == "answer":
                yield message[1], message[2]

    def load(self, weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int], policy_version: int) -> None:
        self.send(("load", dict(checksums), policy_version))
        try:
            send_shared(self.pipe, self.buffer, weights, self.receive)
        except OSError:
            raise self.death("ended") from None
        self.answer()

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        self.send(("probe", list(token_ids)))
        return self.answer()

    def sleep(self) -> None:
        self.send(("sleep",))
        self.answer()

    def wake(self) -> None:
        self.send(("wake",))
        self.answer()

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(PeerDied, PeerFailed):  # then it is killed like one that does not end
            self.send(("close",))
            self.answer()
            self.process.join(self.deadline)
        self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None
        if self.conn is not None:
            self.conn.close()
            self.conn = None

    @property
    def pipe(self) -> Connection:
        if self.conn is None:
            raise PeerDied("vLLM's process is not running")
        return self.conn

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self.death("ended") from None

    def answer(self, deadline: float | None = None) -> Any:
        while (message := self.receive(deadline))[0] != "done":
            pass
        return message[1]

    def receive(self, deadline: float | None = None) -> tuple[Any, ...]:
        seconds = self.deadline if deadline is None else deadline
        try:
            if not self.pipe.poll(seconds):
                raise self.death(f"gave no sign of life for {seconds:.0f} s (rollout.deadline)")
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.death("ended") from None
        if message[0] == "failed":
            self.kill()
            raise PeerFailed(f"{message[1]} (its log: {self.log})")
        return message

    def death(self, what: str) -> PeerDied:
        """What to raise; the process is gone behind it."""
        if self.process is not None:
            self.process.join(1.0)
            code = self.process.exitcode
            what += f" with exit code {code}" if what == "ended" and code is not None else ""
        self.kill()
        return PeerDied(f"vLLM's process {what} (its log: {self.log})")
