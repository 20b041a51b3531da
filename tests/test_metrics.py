"""Metrics and the run directory: counts that add up, null for nan, files that survive a crash and a resume."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from e3fast.metrics import StageClock, number, peak_gib, step_metrics, tenth_means
from e3fast.runlog import RunLog, read_evals, read_metrics, read_rollouts, readable_answer
from e3fast.types import (
    VERDICTS,
    Batch,
    Coefficients,
    FinishReason,
    Group,
    LossParams,
    PackingPlan,
    Prompt,
    Request,
    Rollout,
    Score,
    StepContext,
    StepStats,
    Verdict,
)


def make_prompt(row: int, question: str = "2+2?") -> Prompt:
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": question})
    return Prompt(id=f"p{row}", row=row, token_ids=(1, 2), messages=messages, answer="4", source="gym:sum#0")


def make_group(row: int, verdicts: list[Verdict], finish: FinishReason = "stop", temperature: float = 1.0) -> Group:
    request = Request(make_prompt(row), len(verdicts), temperature, 16, seed=row)
    rollouts = tuple(
        Rollout(request, tuple(range(i + 1)), f"answer {i}", (0.0,) * (i + 1), finish, 3) for i in range(len(verdicts))
    )
    scores = tuple(Score(float(v == "correct"), v, {"accuracy": float(v == "correct")}) for v in verdicts)
    return Group(row, request, rollouts, scores)


def make_context(groups: list[Group], step: int = 0) -> StepContext:
    return StepContext(
        seed=0,
        step=step,
        max_steps=10,
        num_prompts=8,
        prompts_per_step=4,
        rollouts_per_prompt=4,
        visits=4,
        need=4,
        refill=lambda n: [],
        regrouped=lambda groups: groups,
        encode=lambda messages: (1, 2),
        latents=lambda prompts: np.zeros((len(prompts), 256)),
        clean={g.prompt.id: g.counts for g in groups},
    )


def make_batch() -> Batch:
    return Batch(((),), ((),), (), 10, 3, 2, make_plan((0, 1), 60, 80), make_plan((2,), 15, 20))


def make_plan(fragment: tuple[int, ...], tokens: int, unshared: int) -> PackingPlan:
    """One micro-batch of one fragment, under a cap of 100 tokens, two units of cost each."""
    return PackingPlan(
        num_ranks=1,
        cap=100,
        coefficients=Coefficients(c0=0.0, a=2.0, b=0.0),
        bins=(((fragment,),),),
        tokens=((tokens,),),
        costs=((2.0 * tokens,),),
        unshared_tokens=unshared,
        unshared_cost=2.0 * unshared,
        digest="",
    )


def make_stats(entropy: float = 0.7) -> StepStats:
    return StepStats(
        loss=0.1,
        entropy=entropy,
        entropy_tokens=20,
        num_classes=50,
        entropy_at_one=math.nan,
        elasticity=math.nan,
        grad_norm=0.5,
        ratio_max=1.01,
        clip_share=0.0,
        mismatch_mean=1e-4,
        mismatch_max=1e-3,
        mismatch_kl=0.0002,
        effective_sample_share=0.99,
        importance_capped=math.nan,
        importance_kept=math.nan,
        kl=math.nan,
        keep_rate=math.nan,
        trained_tokens=60,
        scored_tokens=15,
        trained_seconds=(0.5,),
        scored_seconds=(0.2,),
        stepped=True,
    )


def test_hand_counted_step() -> None:
    groups = [
        make_group(0, ["correct", "wrong", "failed"], temperature=1.5),
        make_group(1, ["truncated", "unparsable"]),
        make_group(2, ["correct"], finish="length"),
        make_group(3, ["failed"]),
    ]
    metrics = step_metrics(make_context(groups), groups, LossParams(), make_batch(), make_stats())
    assert metrics["rollouts"] == 7 and metrics["generated_tokens"] == 1 + 2 + 3 + 1 + 2 + 1 + 1
    assert metrics["mean_completion_tokens"] == pytest.approx(11 / 7)
    assert [metrics[f"verdict/{v}"] for v in VERDICTS] == [2, 1, 1, 1, 2]
    assert metrics["truncated_correct"] == 1
    assert metrics["reward"] == pytest.approx(2 / 5)
    assert metrics["clean_accuracy"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    shares = [metrics[f"{name}_share"] for name in ("signal", "all_wrong", "all_correct")]
    assert shares == pytest.approx([1 / 3] * 3)
    assert (metrics["group_size_min"], metrics["group_size_mean"], metrics["group_size_max"]) == (1, 7 / 4, 3)
    assert metrics["temperature"] == pytest.approx((3 * 1.5 + 4) / 7)
    assert metrics["fill"] == pytest.approx(75 / 200) and metrics["prompt_work_saved"] == pytest.approx(0.25)
    assert metrics["micro_batches"] == 2 and metrics["packing/num_micro_batches"] == 1
    assert metrics["packing/fill"] == pytest.approx(0.6) and metrics["packing/prompt_work_saved"] == pytest.approx(0.25)
    assert metrics["packing/lockstep_efficiency"] == 1.0 and metrics["packing/sharing_active"] is True


def test_groups_are_counted_by_prompt_and_retries_apart() -> None:
    """A prompt split over draws is one group; what a retry sampled is in no group size and in no clean count."""
    split = [make_group(0, ["correct", "wrong"]), make_group(0, ["wrong"]), make_group(1, ["wrong"] * 4)]
    extra = [make_group(1, ["correct", "wrong"]), make_group(1, ["correct"]), make_group(2, ["wrong"])]
    extra = [dataclasses.replace(g, request=dataclasses.replace(g.request, kind="extra")) for g in extra]
    ctx = make_context([])
    ctx.clean, ctx.round = {"p0": (3, 1), "p1": (4, 0)}, 2
    metrics = step_metrics(ctx, split + extra, LossParams(beta=0.25), make_batch(), make_stats())
    assert (metrics["prompts"], metrics["group_size_min"], metrics["group_size_max"]) == (2, 3, 4)
    assert metrics["group_size_mean"] == 3.5 and metrics["rollouts"] == 11
    assert (metrics["signal_share"], metrics["all_wrong_share"], metrics["all_correct_share"]) == (0.5, 0.5, 0.0)
    assert metrics["extra_token_share"] == pytest.approx((3 + 1 + 1) / (3 + 1 + 10 + 3 + 1 + 1))
    assert metrics["rescued_prompts"] == 1 and metrics["rounds"] == 2 and metrics["beta"] == 0.25
    assert metrics["clean_accuracy"] == pytest.approx((1 / 3 + 0) / 2)
    empty = step_metrics(make_context([]), [], LossParams(), make_batch(), make_stats())
    assert (empty["prompts"], empty["extra_token_share"], empty["rescued_prompts"]) == (0, 0.0, 0)


def test_laws_on_random_groups() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = rng.integers(0, 65, size=rng.integers(0, 6))
        groups = [make_group(i, [VERDICTS[v] for v in rng.integers(0, 5, size=n)]) for i, n in enumerate(sizes)]
        metrics = step_metrics(make_context(groups), groups, LossParams(), make_batch(), make_stats())
        assert sum(metrics[f"verdict/{v}"] for v in VERDICTS) == metrics["rollouts"] == sizes.sum()
        shares = sum(metrics[f"{name}_share"] for name in ("signal", "all_wrong", "all_correct"))
        assert math.isclose(shares, 1) if any(g.counts[0] for g in groups) else math.isnan(shares)


def test_step_of_failures_only_has_no_accuracy(tmp_path: Path) -> None:
    groups = [make_group(0, ["failed", "failed"])]
    RunLog(tmp_path).write_step(
        step_metrics(make_context(groups), groups, LossParams(), make_batch(), make_stats(math.nan))
    )
    (row,) = read_metrics(tmp_path)
    assert row["entropy"] is row["clean_accuracy"] is row["reward"] is row["signal_share"] is None
    assert row["verdict/failed"] == 2 and row["stepped"] is True


def test_clock_sums_to_wall_time_and_pauses_outer_stage() -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 20.0])
    clock = StageClock(now=lambda: next(ticks))
    with clock("generate"), clock("reward"):
        pass
    assert clock.take() == {"other": 1.0 + 5.0, "generate": 2.0 + 4.0, "reward": 3.0}
    assert clock.take() == {"other": 5.0}


def test_clock_ends_a_stage_that_raises() -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    clock = StageClock(now=lambda: next(ticks))
    with pytest.raises(KeyError), clock("generate"):
        raise KeyError
    assert clock.take() == {"other": 5.0, "generate": 2.0}


def test_lines_are_json_without_nan(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write_step({"step": np.int64(0), "a": np.float32("nan"), "b": math.inf, "c": 1 / 3, "d": {"e": [math.nan]}})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row == {"step": 0, "a": None, "b": None, "c": 1 / 3, "d": {"e": [None]}}
    assert text.endswith("\n") and text.count("\n") == 1


def test_half_a_line_costs_that_line_only(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write_step({"step": 0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "los')
    log.write_step({"step": 2})
    problems: list[str] = []
    assert [row["step"] for row in read_metrics(tmp_path, problems)] == [0, 2]
    assert problems == ["metrics.jsonl: line 2 of 3 is damaged"]


def test_rollouts_round_trip(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    group = make_group(0, ["correct", "wrong"], temperature=0.9)
    path = log.write_rollouts(12, [group])
    assert path == tmp_path / "rollouts/step_00012.parquet" and not list(path.parent.glob("*.tmp"))
    first, second = read_rollouts(tmp_path).to_pylist()
    assert first == {
        "step": 12,
        "group": 0,
        "prompt_id": "p0",
        "source": "gym:sum#0",
        "prompt": "2+2?",
        "answer": "4",
        "completion": "answer 0",
        "num_tokens": 1,
        "reward": 1.0,
        "verdict": "correct",
        "parts": '{"accuracy": 1.0}',
        "temperature": 0.9,
        "finish_reason": "stop",
        "kind": "first",
        "draw": 0,
        "policy_version": 3,
    }
    assert second["verdict"] == "wrong"


def test_odd_text_and_empty_steps_are_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    request = Request(make_prompt(0, "lone \ud800 surrogate"), 1, 1.0, 4, 0)
    rollout = Rollout(request, (1,), "nul \0, line \u2028, <b>", (0.0,), "stop", 0)
    log.write_rollouts(0, [Group(0, request, (rollout,), (Score(math.nan, "failed"),))])
    log.write_rollouts(1, [])
    (row,) = read_rollouts(tmp_path).to_pylist()
    assert row["prompt"] == "lone ? surrogate" and row["completion"] == rollout.text and math.isnan(row["reward"])


def test_reading_what_is_there(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == read_evals(tmp_path) == read_rollouts(tmp_path).to_pylist() == []
    log = RunLog(tmp_path)
    log.write_rollouts(0, [make_group(0, ["wrong"])])
    log.write_rollouts(1, [make_group(1, ["wrong"])])
    (tmp_path / "rollouts/step_00002.parquet").write_bytes(b"PAR1")
    problems: list[str] = []
    table = read_rollouts(tmp_path, columns=["verdict", "step"], problems=problems)
    assert table.to_pylist() == [{"verdict": "wrong", "step": 0}, {"verdict": "wrong", "step": 1}]
    assert len(problems) == 1 and "step_00002" in problems[0]
    assert read_rollouts(tmp_path, columns=["step"], steps=[1]).to_pylist() == [{"step": 1}]


def test_resume_forgets_what_is_done_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(4):
        log.write_step({"step": step, "loss": 0.1 * step})
        log.write_rollouts(step, [make_group(0, ["wrong"])])
        log.write_eval({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step')
    (tmp_path / "rollouts/step_00004.parquet.tmp").touch()
    log.truncate_after(2)
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 0.1}]
    assert [row["step"] for row in read_evals(tmp_path)] == [0, 1, 2]  # step 2's policy is the one that resumes
    assert sorted(p.name for p in log.rollouts.iterdir()) == ["step_00000.parquet", "step_00001.parquet"]


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_failed_write_names_the_file_and_leaves_no_half_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write_rollouts(0, [make_group(0, ["wrong"])])
    with disk_full_after(100):
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            log.write_step({"step": 0, "text": "x" * 200})
        with pytest.raises(OSError, match=r"step_00000\.parquet"):
            log.write_rollouts(0, [make_group(0, ["correct"] * 50)])
    assert [path.name for path in log.rollouts.iterdir()] == ["step_00000.parquet"]
    assert read_rollouts(tmp_path).num_rows == 1


def test_tenths_and_numbers() -> None:
    rows = [{"step": i, "x": float(i) if i else None} for i in range(25)]
    assert tenth_means(rows, "x") == (1.5, 23.0)
    assert tenth_means(rows, "y") == tenth_means([], "x") == (None, None)
    assert number({"x": math.nan}, "x") is number({"x": "1"}, "x") is number({}, "x") is None
    assert 0 < peak_gib() < 1000


def test_a_gym_answer_is_written_as_a_person_would() -> None:
    assert readable_answer('{"question": "1+1?", "answer": "2", "metadata": {}}') == "2"
    assert [readable_answer(text) for text in ("12", "x = 3", '{"a": 1}', "[1, 2]")] == [
        "12",
        "x = 3",
        '{"a": 1}',
        "[1, 2]",
    ]
