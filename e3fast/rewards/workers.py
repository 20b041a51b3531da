"""Worker processes that run a reward under a hard deadline.

Verifiers parse whatever a policy writes, and some of it makes them hang, raise or crash. So each rollout is a task of
its own in a process that can be killed. A rollout without a verdict (time-out, exception, dead worker) is tried once
more in processes started for the purpose; after that it is `failed`, which is not `wrong`.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import TypeVar

from pebble import ProcessFuture, ProcessPool

from e3fast.types import Prompt, Reward, Rollout, Score

Pair = tuple[Prompt, Rollout]
T = TypeVar("T")
GRACE = 10.0  # seconds past the deadline after which a worker ends itself, should nobody be left to kill it
logger = logging.getLogger(__name__)


class RewardPool:
    """Scores rollouts in `num_workers` processes, each rollout within `deadline` seconds. Usable from any thread.

    A worker's start (imports, about a second) is not on any rollout's clock. `num_failures` counts `failed` rollouts.
    """

    def __init__(self, reward: Reward, num_workers: int = 1, deadline: float = 10.0) -> None:
        self.num_failures = 0
        self._reward = pickle.dumps(reward)
        self._num_workers = num_workers
        self._deadline = deadline
        self._lock = threading.Lock()  # guards what follows and num_failures
        self._kinds: set[str] = set()
        self._closed = False
        self._pool, self._ready = self._start(num_workers)

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """One score a pair, in order. RuntimeError if the workers cannot start or the pool is closed."""
        # No verifier needs log-probabilities, and they are most of what would go through the pipe.
        light = [(prompt, dataclasses.replace(rollout, rollout_logprobs=())) for prompt, rollout in pairs]
        results = attempt(self._live_pool(), light, self._deadline)
        missing = [i for i, result in enumerate(results) if isinstance(result, str)]
        if missing:
            for i, result in zip(missing, self._retry([light[i] for i in missing]), strict=True):
                results[i] = result
        return [self._fail(result) if isinstance(result, str) else result for result in results]

    def close(self) -> None:
        """Stop the workers; tasks under way are lost."""
        with self._lock:
            self._closed = True
            stop(self._pool)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, num_workers: int) -> tuple[ProcessPool, ProcessFuture[int]]:
        pool = ProcessPool(
            max_workers=num_workers,
            initializer=start_worker,
            initargs=(self._reward, self._deadline + GRACE),
            context=multiprocessing.get_context("spawn"),  # a fork would copy locks of threads, and the GPU's context
        )
        return pool, pool.schedule(os.getpid)

    def _live_pool(self) -> ProcessPool:
        with self._lock:
            if self._closed:
                raise RuntimeError("this reward pool is closed")
            if not self._pool.active:  # pebble gives up a pool when a worker dies idle, for example for lack of memory
                stop(self._pool)
                self._pool, self._ready = self._start(self._num_workers)
            pool, ready = self._pool, self._ready
        if isinstance(reason := outcome(pool, ready), str):
            raise RuntimeError(f"the reward's worker processes do not start ({reason}); their own message stands above")
        return pool

    def _retry(self, pairs: Sequence[Pair]) -> list[Score | str]:
        fresh, _ = self._start(min(self._num_workers, len(pairs)))
        try:
            return attempt(fresh, pairs, self._deadline)
        finally:
            stop(fresh)

    def _fail(self, reason: str) -> Score:
        kind = reason.strip().rpartition("\n")[2].partition(":")[0]
        with self._lock:
            self.num_failures += 1
            first = kind not in self._kinds
            self._kinds.add(kind)
        if first:
            logger.warning("a reward gave no verdict, twice; more failures of this kind are only counted:\n%s", reason)
        return Score(0.0, "failed")


def attempt(pool: ProcessPool, pairs: Sequence[Pair], deadline: float) -> list[Score | str]:
    """One try for each pair: its score, or the reason why there is none."""
    try:
        futures = [pool.schedule(run_reward, args=pair, timeout=deadline) for pair in pairs]
    except RuntimeError as error:  # the pool broke down since it was looked at
        return [f"RuntimeError: {error}"] * len(pairs)
    return [outcome(pool, future) for future in futures]


def outcome(pool: ProcessPool, future: ProcessFuture[T]) -> T | str:
    """Result of a task, or the reason why there is none."""
    while not wait([future], timeout=1.0).done:
        if not pool.active and not future.done():  # pebble forgets the tasks still queued in a pool that broke down
            return "BrokenProcessPool: the pool of reward workers broke down"
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TimeoutError):
        return "TimeoutError: no verdict within the deadline"
    return f"{type(error).__name__}: {error}"


def stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


# Below: what runs in a worker. Pebble's worker already ignores SIGINT, so Ctrl-C reaches the driver alone.

_reward: Reward | None = None
_backstop = 0.0


def start_worker(reward: bytes, backstop: float) -> None:
    """Make a process a worker. Loads the reward's modules, so that no rollout waits for imports."""
    global _reward, _backstop
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # the cores belong to the trainer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's Python handler would wait for a C loop to end
    _reward, _backstop = pickle.loads(reward), backstop


def run_reward(prompt: Prompt, rollout: Rollout) -> Score | str:
    """A score, or the traceback. As text, since an exception that does not unpickle would break the driver's pipe."""
    assert _reward is not None
    signal.setitimer(signal.ITIMER_REAL, _backstop)
    try:
        score = _reward(prompt, rollout)
        return score if isinstance(score, Score) else f"TypeError: a reward must return a Score, got {score!r}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
