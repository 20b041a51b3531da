"""The transformers engine: unequal counts and temperatures in one call, log-probs equal to the learner's, ids kept."""

import dataclasses

import numpy as np
import pytest
import torch

from csrc_triton import linear_logprobs
from e3fast.advantages import make_samples
from e3fast.model import output_head, packed_hidden
from e3fast.packing import pack
from e3fast.rollout.transformers import TransformersEngine
from e3fast.types import Group, Score
from tests.dense import dense_rows
from tests.records import prompt, request
from tests.tiny import FAMILIES, make_family, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = [prompt(0, (5, 6, 7)), prompt(1, (9,)), prompt(2, tuple(range(20, 45)))]


def engine(max_sequences=100, dtype=torch.float32):
    return TransformersEngine(make_model(dtype), TOKENIZER, max_sequences)


def requests():
    knobs = [(5, 0.6, 11), (1, 1.0, 12), (3, 1.4, 13)]
    return [request(p, n, t, seed=s, max_new_tokens=9) for p, (n, t, s) in zip(PROMPTS, knobs, strict=True)]


def test_counts_temperatures_and_limits():
    asked = [dataclasses.replace(r, max_new_tokens=m) for r, m in zip(requests(), (9, 4, 9), strict=True)]
    done = engine().generate(asked)
    assert [len(own) for own in done] == [5, 1, 3]
    for own, wanted in zip(done, asked, strict=True):
        for rollout in own:
            assert rollout.request is wanted and 1 <= len(rollout.token_ids) <= wanted.max_new_tokens
            assert len(rollout.rollout_logprobs) == len(rollout.token_ids)
            ended = rollout.token_ids[-1] == 0
            assert rollout.finish_reason == ("stop" if ended else "length") and 0 not in rollout.token_ids[:-1]


def test_a_completion_does_not_depend_on_its_company():
    together = engine().generate(requests())
    apart = [engine().generate([r])[0] for r in requests()]
    in_turns = engine(max_sequences=2).generate(requests())
    for a, b, c in zip(together, apart, in_turns, strict=True):
        assert [x.token_ids for x in a] == [x.token_ids for x in b] == [x.token_ids for x in c]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_learners_at_each_rows_temperature(family):
    """trl#4159, prime-rl#697: 0.6, 1 and 1.4 mixed in one packed row. Prompts are longer than the families' windows."""
    source = TransformersEngine(make_family(family), TOKENIZER, 100)
    head = output_head(source.model)
    groups = [
        Group(i, r, tuple(own), tuple(Score(float(j % 2), "correct") for j in range(len(own))))
        for i, (r, own) in enumerate(zip(requests(), source.generate(requests()), strict=True))
    ]
    samples = make_samples(groups, "grpo")
    batch = pack(samples, [1.0] * len(samples), 10_000, 1)
    for m in (*batch.micro_batches[0], *batch.forward_only[0]):
        rows = torch.nonzero(m.loss_mask)[:, 0]
        with torch.no_grad():
            hidden = packed_hidden(source.model, m)[rows]
            out = linear_logprobs(
                hidden,
                head.weight,
                m.targets[rows],
                bias=head.bias,
                temperature=m.temperatures[rows],
                logit_scale=head.logit_scale,
                softcap=head.softcap,
            )
        assert float((out.logprobs - m.rollout_logprobs[rows]).abs().max()) < 1e-5


def test_ids_are_the_engines_own():
    """trl#5224: text serves rewards only; decoding and encoding again need not give the ids back."""
    (own,) = engine().generate([request(PROMPTS[0], 20, 2.0, max_new_tokens=12)])
    assert any(tuple(TOKENIZER(r.text, add_special_tokens=False).input_ids) != r.token_ids for r in own)


def test_generation_settings_of_the_model_do_not_bend_the_distribution():
    """Qwen2.5 ships repetition_penalty = 1.05; the learner scores without it."""
    plain, bent = engine(), engine()
    bent.model.generation_config.repetition_penalty = 5.0
    bent.model.generation_config.min_new_tokens = 9
    bent.model.generation_config.suppress_tokens = list(range(60, 200))
    a, b = plain.generate(requests()), bent.generate(requests())
    assert [r.token_ids for own in a for r in own] == [r.token_ids for own in b for r in own]
    assert bent.model.generation_config.repetition_penalty == 5.0


def test_weights_are_taken_over():
    source, other = engine(), make_model(seed=5)
    before = source.generate(requests())
    source.load_weights(other.named_parameters(), policy_version=3)
    after = source.generate(requests())
    assert before[0][0].token_ids != after[0][0].token_ids and after[0][0].policy_version == 3
    for a, b in zip(source.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_without_an_end_is_refused():
    model = make_model()
    model.generation_config.eos_token_id = None
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        TransformersEngine(model, tokenizer, 4)


def behind(rollout, ids):
    """A rollout as a sample whose prompt is `ids`."""
    other = dataclasses.replace(rollout.request, prompt=prompt(9, ids), prefixed_ids=())
    group = Group(0, other, (dataclasses.replace(rollout, request=other),), (Score(0.0, "wrong"),))
    return make_samples([group], "grpo")[0]


def test_a_prefixed_request_is_sampled_behind_its_prefix():
    """And beside plain ones of the same prompt: log-probs are those of a dense pass behind the engine's own tokens."""
    source = engine(dtype=torch.float64)
    plain = request(PROMPTS[0], 3, 1.0, seed=4, max_new_tokens=9)
    prefixed = [
        dataclasses.replace(plain, kind="extra", prefixed_ids=ids, temperature=1.3)
        for ids in ((50, 60, 70, 80, 5, 6, 7), (5, 6, 7, 90))
    ]
    done = source.generate([prefixed[0], plain, prefixed[1]])
    for own, asked in zip(done, (prefixed[0], plain, prefixed[1]), strict=True):
        for rollout in own:
            assert rollout.request is asked and rollout.request.route == ("rescue" if asked.prefixed_ids else "plain")
            with torch.no_grad():
                right = dense_rows(source.model, behind(rollout, asked.engine_ids))[0].numpy()
                wrong = dense_rows(source.model, behind(rollout, asked.prompt.token_ids))[0].numpy()
            assert np.allclose(rollout.rollout_logprobs, right, atol=1e-5)
            assert np.allclose(wrong, right, atol=1e-2) == (not asked.prefixed_ids)


@pytest.mark.parametrize("cuts", [(2, 3), (0, 5), (1, 1, 1, 2), (4, 1)])
def test_a_split_request_samples_the_same_completions(cuts):
    whole = request(PROMPTS[2], 5, 1.2, seed=4, max_new_tokens=9, first_rollout=2)
    starts = [2 + sum(cuts[:i]) for i in range(len(cuts))]
    parts = [dataclasses.replace(whole, num_rollouts=n, first_rollout=at) for n, at in zip(cuts, starts, strict=True)]
    (want,), got = engine().generate([whole]), engine().generate(parts)
    assert [len(own) for own in got] == list(cuts)
    flat = [rollout for own in got for rollout in own]
    assert [r.token_ids for r in flat] == [r.token_ids for r in want] and len({r.token_ids for r in want}) > 1
    for a, b in zip(flat, want, strict=True):
        assert np.allclose(a.rollout_logprobs, b.rollout_logprobs, atol=1e-5)
