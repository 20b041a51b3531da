"""Laws of the reward workers: order is kept, deadlines are hard, no verdict means `failed`, the pool goes on."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from e3fast.config import RewardConfig
from e3fast.rewards import find_reward
from e3fast.rewards.workers import RewardPool
from e3fast.types import Prompt, Request, Rollout, Score


class DoesNotUnpickle(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


def obedient(prompt: Prompt, rollout: Rollout) -> Score:
    """Does what the completion says."""
    match rollout.text.split():
        case ["value", number]:
            threads = float(os.environ.get("OMP_NUM_THREADS", 0))
            return Score(float(number), "wrong", {"pid": os.getpid(), "threads": threads})
        case ["loop"]:
            sum(itertools.repeat(0))  # in C: Python's signal handlers never run
        case ["sleep"]:
            while True:
                time.sleep(0.01)
        case ["raise"]:
            raise DoesNotUnpickle(1, 2)
        case ["exit", code]:
            os._exit(int(code))
        case ["once", path]:
            with open(path, "x"):  # the second try finds the file there
                os._exit(1)
    raise AssertionError(rollout.text)


def obedient_or_second(prompt: Prompt, rollout: Rollout) -> Score:
    try:
        return obedient(prompt, rollout)
    except FileExistsError:
        return Score(float(os.getpid()), "correct")


def generous(prompt: Prompt, rollout: Rollout) -> Score:
    return Score(3.0, "wrong")


def number(prompt: Prompt, rollout: Rollout) -> float:
    return float(rollout.text)


def pairs(*texts: str) -> list[tuple[Prompt, Rollout]]:
    prompt = Prompt("p", 0, (1,), (), "7", "x.jsonl")
    request = Request(prompt, 1, 1.0, 8, seed=0)
    return [(prompt, Rollout(request, (1, 2), text, (-1.0, -2.0), "stop", 0)) for text in texts]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(obedient_or_second, num_workers=2, deadline=0.5) as pool:
        yield pool


def values(pool: RewardPool, *texts: str) -> list[float | str]:
    return [s.verdict if s.verdict == "failed" else s.value for s in pool.score(pairs(*texts))]


def test_scores_keep_the_order_of_the_rollouts(pool: RewardPool) -> None:
    assert values(pool, *(f"value {i}" for i in range(200))) == list(range(200))
    assert pool.score([]) == []


def test_a_worker_has_one_thread_and_ignores_ctrl_c(pool: RewardPool) -> None:
    worker = pool.score(pairs("value 1"))[0].parts
    assert worker["threads"] == 1
    os.kill(int(worker["pid"]), signal.SIGINT)
    assert values(pool, "value 2", "value 3") == [2, 3]


@pytest.mark.parametrize("text", ["sleep", "loop"])
def test_a_hanging_reward_is_failed_also_from_a_thread_and_its_neighbours_are_not(pool: RewardPool, text: str) -> None:
    results: list[float | str] = []
    thread = threading.Thread(target=lambda: results.extend(values(pool, "value 1", text, "value 2")))
    start, failures = time.monotonic(), pool.num_failures
    thread.start()
    thread.join(timeout=30)
    assert results == [1, "failed", 2]
    assert pool.num_failures == failures + 1
    assert time.monotonic() - start < 2 * 0.5 + 8  # two tries, one start of fresh workers
    assert values(pool, "value 3") == [3]


@pytest.mark.parametrize("text", ["raise", "exit 3", "exit 0", "nonsense"])
def test_a_reward_that_raises_or_kills_its_process_is_failed(pool: RewardPool, text: str) -> None:
    assert values(pool, "value 1", text, "value 2") == [1, "failed", 2]


def test_one_retry_in_a_fresh_process(pool: RewardPool, tmp_path) -> None:
    old = {pool.score(pairs("value 1"))[0].parts["pid"] for _ in range(4)}
    failures = pool.num_failures
    score = pool.score(pairs(f"once {tmp_path / 'tried'}"))[0]
    assert score.verdict == "correct"
    assert score.value not in old
    assert pool.num_failures == failures


def test_the_pool_comes_back_after_an_idle_worker_was_killed(pool: RewardPool) -> None:
    os.kill(int(pool.score(pairs("value 1"))[0].parts["pid"]), signal.SIGKILL)
    time.sleep(0.3)
    assert values(pool, "value 2", "value 3") == [2, 3]


def test_several_threads_may_score_at_once(pool: RewardPool) -> None:
    results: dict[int, list[float | str]] = {}

    def work(i: int) -> None:
        results[i] = values(pool, f"value {i}", "exit 1", f"value {i + 10}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {i: [i, "failed", i + 10] for i in range(3)}


def test_the_first_failure_of_a_kind_is_shown_and_the_rest_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(obedient, deadline=5.0) as pool, caplog.at_level(logging.WARNING):
        assert values(pool, "raise", "raise", "raise") == ["failed"] * 3
        assert pool.num_failures == 3
    assert len(caplog.records) == 1
    assert "raise DoesNotUnpickle(1, 2)" in caplog.text


def test_a_closed_pool_says_so() -> None:
    pool = RewardPool(obedient)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(pairs("value 1"))


def test_a_worker_that_cannot_start_is_an_error_and_not_a_failed_rollout() -> None:
    with (
        RewardPool(Unloadable()) as pool,  # pyright: ignore[reportArgumentType]
        pytest.raises(RuntimeError, match="do not start"),
    ):
        pool.score(pairs("value 1"))


class Unloadable:
    def __reduce__(self) -> tuple:
        return json.loads, ("not JSON",)


def test_the_rewards_of_a_run_file() -> None:
    (prompt, rollout) = pairs(r"\boxed{7}")[0]
    for name in ("auto", "math"):
        reward = pickle.loads(pickle.dumps(find_reward(RewardConfig(name, format_weight=0.5))))
        assert reward(prompt, rollout).value == 1.5
    own = find_reward(RewardConfig(f"{__name__}:number"))
    results = [own(*pair) for pair in pairs("1", "0.5")]
    assert [(r.value, r.verdict) for r in results] == [(1.0, "correct"), (0.5, "wrong")]
    with pytest.raises(ValueError, match="finite"):
        own(*pairs("nan")[0])
    assert find_reward(RewardConfig(f"{__name__}:generous"))(prompt, rollout) == generous(prompt, rollout)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig("maths"), "did you mean 'math'"),
        (RewardConfig("nowhere:f"), "cannot load reward 'nowhere:f'"),
        (RewardConfig("json:nothing"), "cannot load reward"),
        (RewardConfig("math:pi"), "is not a function"),
        (RewardConfig("json:loads", format_weight=0.1), "format_weight does nothing"),
    ],
)
def test_a_bad_reward_name_is_a_value_error(config: RewardConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_reward(config)


def test_workers_import_neither_torch_nor_transformers() -> None:
    imports = "import sys, e3fast.rewards.workers, e3fast.rewards.auto"
    code = f"{imports}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
