"""LoremRetry: the words, who is rescued and how, the merge, and its guards."""

import dataclasses
import functools
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e3fast.advantages import make_samples
from e3fast.config import DataConfig, RunConfig
from e3fast.methods import LoremRetry, PerturbedWeights, check_methods
from e3fast.methods.lope import TAIL, surround
from e3fast.methods.lorem import WORDS, lorem
from e3fast.streams import stream_key
from e3fast.train import ask_again, roll_out
from e3fast.types import LossParams, Prompt, Rollout, Score
from tests.records import context, group, prompt, request, stats

ROOMY = RunConfig(data=DataConfig(max_prompt_tokens=2048))


def started(config=ROOMY, **knobs):
    method = LoremRetry(**knobs)
    method.start(config, 6)
    return method


def after_round_one(groups, **changes):
    """The context as the trainer leaves it behind the first round."""
    clean = {}
    for g in groups:
        judged, correct = clean.get(g.prompt.id, (0, 0))
        clean[g.prompt.id] = (judged + g.counts[0], correct + g.counts[1])
    return context(round=1, clean=clean, rows={g.prompt.id: g.prompt.row for g in groups}, **changes)


def wrong(of=None, n=8, **changes):
    return group(of, verdicts=["wrong"] * n, **changes)


def rescues(of, num_correct, total=24, size=4, first_id=10, **changes):
    """Groups of `size` rescue rollouts, the first `num_correct` of them correct."""
    verdicts = ["correct"] * num_correct + ["wrong"] * (total - num_correct)
    return [
        group(of, verdicts=verdicts[i : i + size], id=first_id + i, kind="extra", **changes)
        for i in range(0, total, size)
    ]


def test_word_list_and_text():
    assert len(WORDS) == len(set(WORDS)) == 182 and list(WORDS) == sorted(WORDS)
    words = lorem(7, 0, 0, "p42", 100, 300)
    assert len(words) == 151 and words[-1] == "fulmen"
    assert " ".join(words[:8]) == "comes collis ramus fuga lignum domus longus felix"


@given(st.integers(0, 99), st.integers(1, 60), st.integers(0, 60), st.text(max_size=5))
def test_a_text_has_as_many_words_as_asked(index, low, more, prompt_id):
    words = lorem(3, 1, index, prompt_id, low, low + more)
    assert low <= len(words) <= low + more and set(words) <= set(WORDS)


def test_both_word_limits_are_reached():
    assert {len(lorem(0, 0, k, "p", 2, 4)) for k in range(60)} == {2, 3, 4}


def test_trigger_is_accuracy_among_judged_rollouts():
    """Format rewards hide nothing, failed rollouts trigger nothing, one correct rollout is enough to be left alone."""
    groups = [
        group(prompt(0), rewards=[0.1] * 8, verdicts=["wrong"] * 8),
        group(prompt(1), verdicts=["failed"] * 8),
        group(prompt(2), verdicts=["wrong"] * 7 + ["correct"]),
        group(prompt(3), verdicts=["truncated"] * 8),
        group(prompt(4), verdicts=["failed"] * 7 + ["unparsable"]),
    ]
    ctx = after_round_one(groups)
    asked = started().retry(ctx, groups)
    assert [r.prompt.row for r in asked] == [0] * 6 + [3] * 6 + [4] * 6
    assert sum(r.num_rollouts for r in asked) == 3 * 24 and {r.kind for r in asked} == {"extra"}
    ctx.round = 2
    assert started().retry(ctx, groups) == []


def test_a_prompt_whose_draws_differ_is_judged_as_a_whole():
    groups = [wrong(prompt(0), 4, draw=1), group(prompt(0), verdicts=["correct"] * 4, draw=2), wrong(prompt(1), draw=1)]
    assert {r.prompt.row for r in started().retry(after_round_one(groups), groups)} == {1}


def test_requests_of_a_rescue():
    groups = [wrong(prompt(3), temperature=0.7, max_new_tokens=99)]
    asked = started(num_prefixes=2, rollouts_per_prefix=3).retry(after_round_one(groups, step=5), groups)
    assert [r.seed for r in asked] == [stream_key(7, "rescue", 5, k, "3") for k in range(2)]
    assert {(r.num_rollouts, r.temperature, r.max_new_tokens, r.draw, r.route) for r in asked} == {
        (3, 0.7, 99, 0, "rescue")
    }
    (hot,) = started(num_prefixes=1, temperature=1.2).retry(after_round_one(groups), groups)
    assert hot.temperature == 1.2


def seen_messages(method, of, refuse_system=False, **changes):
    """What the method has the chat template encode for a rescue of one prompt."""
    seen = []

    def encode(messages):
        if refuse_system and messages[0]["role"] == "system":
            raise ValueError("no system role")
        seen.append(messages)
        return (1, 2, 3)

    groups = [wrong(of)]
    asked = method.retry(after_round_one(groups, encode=encode, **changes), groups)
    assert {r.prefixed_ids for r in asked} <= {(1, 2, 3)} and {r.engine_ids for r in asked} <= {(1, 2, 3)}
    return seen


P42 = Prompt("p42", 3, (5, 6), ({"role": "user", "content": "1 + 1?"},), "2", "test")
WITH_SYSTEM = dataclasses.replace(P42, messages=({"role": "system", "content": "Be brief."}, *P42.messages))
TEXT = " ".join(lorem(7, 0, 0, "p42", 100, 300))


@pytest.mark.parametrize(
    ("of", "prefix", "refuse", "expected"),
    [
        (P42, "system", False, [("system", f"{TEXT}\n{TAIL}"), ("user", "1 + 1?")]),
        (WITH_SYSTEM, "system", False, [("system", f"{TEXT}\nBe brief."), ("user", "1 + 1?")]),
        (P42, "system", True, [("user", f"{TEXT}\n{TAIL}\n1 + 1?")]),
        (P42, "after_question", False, [("system", TAIL), ("user", f"1 + 1?\n{TEXT}")]),
        (WITH_SYSTEM, "after_question", False, [("system", "Be brief."), ("user", f"1 + 1?\n{TEXT}")]),
        (P42, "after_question", True, [("user", f"{TAIL}\n1 + 1?\n{TEXT}")]),
    ],
)
def test_where_the_words_stand(of, prefix, refuse, expected):
    (messages,) = seen_messages(started(num_prefixes=1, prefix=prefix), of, refuse)
    assert [(m["role"], m["content"]) for m in messages] == expected


def test_naive_retry_asks_the_plain_prompt():
    method, groups = started(RunConfig(), prefix="none"), [wrong(P42)]  # no room for words is needed
    asked = method.retry(after_round_one(groups, encode=None), groups)
    assert len(asked) == 6 and {r.prefixed_ids for r in asked} == {()} and asked[0].engine_ids == P42.token_ids


def test_another_tail_and_no_tail():
    assert surround(P42.messages, "a b", "", "system")[0]["content"] == "a b"
    assert surround(P42.messages, "a b", "", "after_question") == ({"role": "user", "content": "1 + 1?\na b"},)
    (messages,) = seen_messages(started(num_prefixes=1, tail="Answer."), P42)
    assert messages[0]["content"] == f"{TEXT}\nAnswer."


def test_what_the_template_refuses_for_good_is_an_error():
    def encode(messages):
        raise ValueError("no user role either")

    with pytest.raises(ValueError, match="no user role either"):
        started().retry(after_round_one([wrong(P42)], encode=encode), [wrong(P42)])


def spell(messages):
    """A token a word, as text, so that tests can read them."""
    return tuple(word for message in messages for word in message["content"].split())


@given(st.integers(0, 180))
def test_words_are_dropped_from_the_front_until_the_prompt_fits(limit):
    """The longest end of the words that fits is kept; where tail and question alone are too long nothing is asked."""
    method, groups = started(num_prefixes=1), [wrong(P42)]
    ctx = after_round_one(groups, encode=spell, max_prompt_tokens=limit)
    asked = method.retry(ctx, groups)
    assert method.retry(ctx, groups) == asked  # the counts are the step's own: asked twice, counted once
    closing = tuple(f"{TAIL} 1 + 1?".split())
    if limit < len(closing):
        assert asked == [] and method.report() == {"rescued": 0, "prefixes_cut": 0, "prefixes_skipped": 1}
        return
    whole = (*TEXT.split(), *closing)
    assert asked[0].prefixed_ids == whole[max(len(whole) - limit, 0) :]
    assert method.report()["prefixes_cut"] == (limit < len(whole)) and method.report()["prefixes_skipped"] == 0


def test_words_of_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"w{i}" for i in range(20)) + "\n\n")
    (messages,) = seen_messages(started(num_prefixes=1, words=str(path), tail="."), P42)
    assert set(messages[0]["content"].split()) <= {f"w{i}" for i in range(20)} | {"."}


@given(st.floats(0.01, 4), st.integers(0, 100))
def test_extra_rollouts_stay_within_their_share(share, step):
    groups = [wrong(prompt(row)) for row in range(6)]
    asked = started(max_extra=share).retry(after_round_one(groups, step=step), groups)
    assert sum(r.num_rollouts for r in asked) <= share * 48
    rows = [r.prompt.row for r in asked]
    assert len(asked) == 6 * min(int(share * 2), 6) and rows == sorted(rows)


def test_which_prompts_fit_the_share_differs_by_step():
    groups = [wrong(prompt(row)) for row in range(6)]
    method = started(max_extra=0.5)
    chosen = {method.retry(after_round_one(groups, step=step), groups)[0].prompt.row for step in range(40)}
    assert chosen == set(range(6))


@pytest.mark.parametrize(
    ("num_first", "num_correct", "num_kept", "shaped", "plain"),
    [
        (8, 1, 1, (5.4801, -0.1768), (2.4749, -0.3536)),
        (8, 2, 2, (3.8120, -0.2541), (1.6202, -0.5401)),
        (8, 4, 4, (2.6041, -0.3720), (0.9354, -0.9354)),
        (8, 7, 7, (1.8601, -0.5208), (0.3536, -2.4749)),
        (8, 12, 7, (1.2707, -0.7624), (0.3536, -2.4749)),
        (4, 3, 3, (2.8347, -0.3402), (0.5000, -1.5000)),
        (4, 5, 3, (2.1061, -0.4579), (0.5000, -1.5000)),
    ],
)
def test_advantages_of_a_merged_group(num_first, num_correct, num_kept, shaped, plain):
    groups = [wrong(prompt(0), num_first), *rescues(prompt(0), num_correct)]
    for method, expected in ((started(), shaped), (started(advantage_shaping=False), plain)):
        (merged,) = method.regroup(context(), groups)
        advantages = [sample.advantages[-1] for sample in make_samples([merged], "grpo")]
        wanted = [expected[0]] * num_kept + [expected[1]] * (num_first - num_kept)
        assert advantages == pytest.approx(wanted, abs=1e-4)


@given(
    st.lists(st.sampled_from(["wrong", "failed", "truncated"]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["wrong", "failed", "correct"]), max_size=12),
    st.integers(0, 5),
)
def test_merge_keeps_the_size_and_a_failure(first, extra, step):
    """All verdicts: the size is n, only correct rescues enter, in their order, and the same call gives the same."""
    own = group(prompt(2), verdicts=first, id=4)
    other = wrong(prompt(1), id=5)
    again = [group(prompt(2), verdicts=[v], id=9 + i, kind="extra") for i, v in enumerate(extra)]
    method, ctx, groups = started(), context(step=step), [other, own, *again]
    merged = method.regroup(ctx, groups)
    assert groups == [other, own, *again] and method.regroup(ctx, groups) == merged
    assert merged[0] is other and len(merged) == 2
    judged, num_correct = own.counts[0], extra.count("correct")
    if not num_correct or judged < 2:
        assert merged[1] is own
        return
    assert merged[1].counts == (judged, min(num_correct, judged - 1)) and merged[1].id == 4
    places = [next((i for i, g in enumerate(again) if g.rollouts[0] is r), None) for r in merged[1].rollouts]
    inside = [place for place in places if place is not None]
    assert inside == sorted(set(inside)) and places[len(inside) :] == [None] * (judged - len(inside))
    assert len(merged[1].stats_rewards) == judged + len(extra) - extra.count("failed")


def test_which_of_too_many_correct_rescues_enter_is_random():
    groups = [wrong(prompt(0), 4), *rescues(prompt(0), 6, total=6, size=1)]
    entered = set()
    for step in range(60):
        (merged,) = started().regroup(context(step=step), groups)
        entered.add(tuple(i for i, g in enumerate(groups[1:]) if any(g.rollouts[0] is r for r in merged.rollouts)))
    assert len(entered) > 10 and {i for picks in entered for i in picks} == set(range(6))


def test_groups_without_a_rescue_come_back_as_they_are():
    groups = [wrong(prompt(0)), group(prompt(1))]
    assert started().regroup(context(), groups) is groups
    assert started().regroup(context(), [*groups, *rescues(prompt(0), 0)]) == groups
    assert started().regroup(context(), rescues(prompt(0), 24)) == []  # its first group was dropped before


def test_draws_of_a_prompt_become_one_group():
    a, b = wrong(prompt(0), 3, id=1, draw=1), wrong(prompt(0), 2, id=3, draw=2)
    other = wrong(prompt(1), id=2)
    merged = started().regroup(context(), [a, other, b, *rescues(prompt(0), 2)])
    assert [g.id for g in merged] == [1, 2] and merged[0].counts == (5, 2)
    assert merged[0].rollouts[2:] == (a.rollouts[2], *b.rollouts)
    unsolved = started().regroup(context(), [a, other, b, *rescues(prompt(0), 0)])
    assert unsolved == [a, other, b]


def test_rescue_rows_are_scored_behind_the_plain_prompt():
    """The ratio is pi(o | prompt)/pi_sampled(o | words, prompt): the learner gets the plain tokens and the engine's
    log-probs; the rows count in no entropy."""
    groups = [wrong(prompt(0, (5, 6, 7))), *rescues(prompt(0, (5, 6, 7)), 1, prefixed_ids=(90, 91, 5, 6, 7))]
    samples = make_samples(started().regroup(context(), groups), "grpo")
    assert [s.route for s in samples] == ["rescue"] + ["plain"] * 7
    assert samples[0].token_ids.tolist() == [5, 6, 7, 10, 11, 12] and samples[0].num_prompt_tokens == 3
    assert samples[0].rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
    assert not samples[0].entropy_mask.any() and samples[1].entropy_mask.any()


class OddsAreSolved:
    """Engine and reward in one: prompts of odd row are solved, and every rescue is."""

    def generate(self, requests):
        return [[Rollout(r, (1,), "t", (-0.1,), "stop", 0)] * r.num_rollouts for r in requests]

    __call__ = generate

    def score(self, pairs):
        solved = [p.row % 2 == 1 or r.request.kind == "extra" for p, r in pairs]
        return [Score(float(s), "correct" if s else "wrong") for s in solved]


def test_clean_counts_know_nothing_of_rescues():
    """The first step's clean counts with the method on and off, over both of its rounds."""
    first = [request(prompt(row)) for row in range(4)]
    counts = []
    for methods in ((), (started(),)):
        ctx, engine = context(), OddsAreSolved()
        groups = roll_out(ctx, engine, engine, first, lambda stage: nullcontext(), 0)
        while asked := ask_again(ctx, methods, groups):
            groups += roll_out(ctx, engine, engine, asked, lambda stage: nullcontext(), len(groups))
        counts.append(ctx.clean)
        assert len(groups) == (4 + 2 * 6 if methods else 4) and ctx.round == (2 if methods else 1)
    assert counts[0] == counts[1] == {"0": (8, 0), "1": (8, 8), "2": (8, 0), "3": (8, 8)}


def test_loss_of_rescue_rows():
    loss = LossParams()
    assert started().tune(context(), loss) == dataclasses.replace(loss, rescue_shape=0.1)
    assert started(shaping_c=0.3).tune(context(), loss).rescue_shape == 0.3
    assert started(policy_shaping=False).tune(context(), loss) is loss


def test_rescued_prompts_are_reported():
    method = started()
    kept = method.regroup(context(), [wrong(prompt(0)), wrong(prompt(1)), *rescues(prompt(0), 3)])
    method.observe(context(), kept, stats())
    assert method.report()["rescued"] == 1
    again = started()
    again.restore(method.state())
    assert again.report() == method.report()


def test_beside_perturbed_weights():
    b3po = functools.partial(PerturbedWeights, "b3po")
    for other, draw in ((b3po(), 1), (b3po(gradient_at="mean"), 0), (PerturbedWeights("c3po"), 0)):
        method = started(dataclasses.replace(ROOMY, methods=(other,)))
        groups = [wrong(prompt(0), draw=1)]
        assert {r.draw for r in method.retry(after_round_one(groups), groups)} == {draw}


def test_beside_itself():
    with pytest.raises(ValueError, match="LoremRetry and LoremRetry both set the rescue"):
        check_methods([LoremRetry(), LoremRetry()])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_prefixes": 0}, "num_prefixes must be >= 1, got 0"),
        ({"rollouts_per_prefix": 0}, "rollouts_per_prefix must be >= 1, got 0"),
        ({"min_words": 400}, r"min_words must be in \[1, max_words=300\], got 400"),
        ({"min_words": 0}, r"min_words must be in \[1, max_words=300\], got 0"),
        ({"shaping_c": 0}, "shaping_c must be > 0, got 0"),
        ({"shaping_c": 0.1, "policy_shaping": False}, "shaping_c is set but policy_shaping is off"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"max_extra": 0.0}, "max_extra must be > 0, got 0.0"),
        ({"prefix": "none", "min_words": 5}, "min_words is set but prefix is 'none'"),
        ({"prefix": "none", "max_words": 5}, "max_words is set but prefix is 'none'"),
        ({"prefix": "none", "words": "x.txt"}, "words is set but prefix is 'none'"),
        ({"prefix": "none", "tail": ""}, "tail is set but prefix is 'none'"),
        ({"words": "/no/such/file"}, "cannot read words file '/no/such/file'"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError, match=message):
        started(**knobs)


def test_too_few_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("a\nb\nc\n")
    with pytest.raises(ValueError, match=r"words file 'x\.txt' has 3 words, needs at least 20"):
        started(words="x.txt")


def test_no_room_for_the_words():
    message = r"lorem_retry: data.max_prompt_tokens 512 leaves no room for 300 words \(about 900 tokens\); raise it or "
    with pytest.raises(ValueError, match=message + "lower max_words"):
        started(RunConfig())
    started(RunConfig(), max_words=150)
