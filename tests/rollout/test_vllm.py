"""The vLLM engine over a peer that is made to die, to lie and to fail: what it asks again, and what it refuses."""

import dataclasses
import math

import pytest
import torch

from e3fast.advantages import make_sample
from e3fast.rollout.engine import EngineError, rollout_key
from e3fast.rollout.peers import PeerDied, PeerFailed
from e3fast.rollout.proof import make_proof
from e3fast.rollout.transfer import checksums
from e3fast.rollout.vllm import MAX_RESTARTS, VllmEngine
from e3fast.rollout.vllm_api import Answer
from e3fast.types import Group
from tests.dense import dense_hidden
from tests.records import prompt, request
from tests.tiny import make_model, make_tokenizer

PROBE = tuple(range(20, 40))
REQUESTS = [request(prompt(i, (5 + i, 6)), n, t, seed=i) for i, (n, t) in enumerate([(3, 0.6), (1, 1.0), (4, 1.4)])]


class FakePeer:
    """Answers by the ask's seed, and holds what it was given. `deaths`: after so many answers of each call, in turn."""

    def __init__(self, deaths=(), fail=None, stale=False, off=0.0):
        self.deaths, self.fail, self.stale, self.off = list(deaths), fail, stale, off
        self.calls, self.asked, self.weights = [], [], {}

    def note(self, verb):
        self.calls.append(verb)
        if self.fail and self.fail[0] == verb:
            raise self.fail[1]

    def start(self):
        self.note("start")

    def sample(self, asks):
        self.note("sample")
        self.asked.append(list(asks))
        left = self.deaths.pop(0) if self.deaths else None
        for i, ask in enumerate(asks):
            if i == left:
                raise PeerDied("vLLM's process ended with exit code -9")
            yield i, answer(ask)

    def load(self, weights, checksums, policy_version):
        self.note("load")
        if not (self.stale and self.weights):
            self.weights = {name: tensor.clone() for name, tensor in weights}

    def probe(self, token_ids):
        self.note("probe")
        model = make_model()
        model.load_state_dict(self.weights, strict=False)
        return [value + self.off for value in make_proof(model, token_ids).logprobs(token_ids)]

    def sleep(self):
        self.note("sleep")

    def wake(self):
        self.note("wake")

    def close(self):
        self.note("close")


def answer(ask):
    n = 1 + ask.seed % ask.max_tokens
    return Answer(tuple(range(1, n + 1)), tuple(-ask.temperature - i for i in range(n)), "stop" if n % 2 else "length")


def make_engine(peer, model=None, max_model_len=64):
    engine = VllmEngine(peer, make_proof(model or make_model(), PROBE), make_tokenizer(), max_model_len)
    engine.start()
    return engine


def test_unequal_counts_and_temperatures_come_back_in_order():
    engine = make_engine(FakePeer())
    engine.load_weights(make_model().named_parameters(), policy_version=7)
    done = engine.generate(REQUESTS)
    assert [len(own) for own in done] == [3, 1, 4]
    for asked, own in zip(REQUESTS, done, strict=True):
        for j, rollout in enumerate(own):
            assert rollout.request is asked and rollout.policy_version == 7
            assert rollout.rollout_logprobs[0] == -asked.temperature
            assert len(rollout.token_ids) == 1 + (rollout_key(asked, j) >> 1) % 16
            assert rollout.finish_reason == ("stop" if len(rollout.token_ids) % 2 else "length")
    seeds = [ask.seed for ask in engine.peer.asked[0]]
    assert len(set(seeds)) == 8 and max(seeds) < 2**63


def test_a_prefixed_prompt_is_what_the_engine_samples_behind():
    engine = make_engine(FakePeer())
    (own,) = engine.generate([dataclasses.replace(REQUESTS[0], prefixed_ids=(9, 9, 9, 5, 6))])
    assert engine.peer.asked[0][0].token_ids == (9, 9, 9, 5, 6) and own[0].request.prompt.token_ids == (5, 6)


def test_a_death_in_the_middle_loses_nothing_and_repeats_nothing():
    whole = make_engine(FakePeer()).generate(REQUESTS)
    engine = make_engine(FakePeer(deaths=[3, 0, 2]))
    before = list(engine.peer.calls)
    assert engine.generate(REQUESTS) == whole
    assert [len(asks) for asks in engine.peer.asked] == [8, 5, 5, 3]
    again = ["sample", "start", "load", "probe"]
    assert engine.peer.calls == before + 3 * again + ["sample"], "each restart gets the weights of now, and proves them"
    assert engine.report()["engine/restarts"] == 3


def test_an_engine_that_only_dies_ends_the_run():
    engine = make_engine(FakePeer(deaths=[0] * MAX_RESTARTS))
    with pytest.raises(EngineError, match=r"sampling: vLLM's process ended with exit code -9; 3 times in a row"):
        engine.generate(REQUESTS)


def test_a_refusal_to_sample_is_no_death():
    engine = make_engine(FakePeer(fail=("sample", PeerFailed("no room"))))
    with pytest.raises(EngineError, match="sampling: vLLM failed: no room"):
        engine.generate(REQUESTS)
    assert engine.peer.calls.count("sample") == 1


@pytest.mark.parametrize(("verb", "phase"), [("start", "start"), ("load", "weights"), ("probe", "probe")])
@pytest.mark.parametrize("kind", [PeerDied, PeerFailed])
def test_a_hand_over_that_fails_names_its_phase(verb, phase, kind):
    with pytest.raises(EngineError, match=f"^{phase}: the reason"):
        make_engine(FakePeer(fail=(verb, kind("the reason"))))


def test_weights_that_did_not_arrive_are_found_by_the_probe():
    model = make_model()
    engine = make_engine(FakePeer(stale=True), model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    with pytest.raises(EngineError, match=r"probe: after the hand-over of version 3 vLLM's log-probs differ .* by"):
        engine.load_weights(model.named_parameters(), policy_version=3)


def test_a_probe_of_nan_is_refused():
    with pytest.raises(EngineError, match="by nan nats"):
        make_engine(FakePeer(off=math.nan))


def test_rounding_passes_the_probe_and_is_reported():
    figures = make_engine(FakePeer(off=5e-4)).report()
    assert figures["engine/probe_mean"] == pytest.approx(5e-4, rel=1e-2) and figures["engine/handover_seconds"] > 0


def test_a_context_beyond_the_engines_is_refused_before_anything_is_asked():
    engine = make_engine(FakePeer(), max_model_len=17)
    with pytest.raises(
        ValueError, match="a prompt of 2 tokens and up to 16 new ones exceed the engine's context of 17"
    ):
        engine.generate(REQUESTS)
    assert "sample" not in engine.peer.calls


def test_a_nan_log_prob_costs_its_token_alone(monkeypatch):
    """trl#6166: vLLM has returned NaN at low entropy."""
    engine = make_engine(FakePeer())
    bad = Answer((4, 5, 6), (-1.0, math.nan, -2.0), "stop")
    sample = make_sample(Group(0, REQUESTS[0], (), ()), engine.rollout(REQUESTS[0], bad), 1.0)
    assert sample.loss_mask.tolist() == [False, False, True, False, True]


def test_the_proof_is_the_models_own_log_probs_of_now():
    model = make_model()
    proof = make_proof(model, PROBE * 9)
    assert len(proof.token_ids) == 64
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        logs = model.get_output_embeddings()(dense_hidden(model, torch.tensor(PROBE))).log_softmax(-1)
    want = [float(logs[i, token]) for i, token in enumerate(PROBE[1:])]
    assert proof.logprobs(PROBE) == pytest.approx(want, abs=1e-4)


def test_checksums_are_of_norms_at_all_depths_and_the_embedding():
    model = make_model(num_hidden_layers=12)
    found = checksums(model.named_parameters())
    assert "model.norm.weight" in found and "model.embed_tokens.weight" in found and 5 <= len(found) <= 9
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    changed = checksums(model.named_parameters())
    assert [name for name in found if found[name] != changed[name]] == ["model.norm.weight"]
