"""A process at the other end of the pipe: late, dead, refusing; each within its deadline and in words."""

import os
import time

import pytest
import torch

from e3fast.rollout.peers import PeerDied, PeerFailed, ProcessPeer
from e3fast.rollout.vllm_api import Answer, Ask, EngineSettings
from e3fast.rollout.vllm_host import serve

SETTINGS = EngineSettings("nowhere", "fp32", 64, 4, 1 << 20, (0,))
ASKS = [Ask((1, 2), 1.0, 4, seed) for seed in range(6)]


class FakeVllm:
    """What `InProcess` offers; a seed of 3 is its death in the middle of a batch, where `mortal`."""

    def __init__(self, mortal):
        self.mortal, self.weights = mortal, {}

    def sample(self, asks):
        for i, ask in enumerate(asks):
            if self.mortal and ask.seed == 3:
                os._exit(7)
            yield None
            yield i, Answer((ask.seed,), (-1.0,), "stop")

    def load(self, weights, checksums, policy_version):
        self.weights = dict(weights)
        if checksums:
            raise RuntimeError("checksum: norm.weight differ from the learner's\nand a traceback")

    def probe(self, token_ids):
        return [float(self.weights[name].double().sum()) for name in sorted(self.weights)]

    def sleep(self):
        time.sleep(60)

    def wake(self):
        return None


def host(conn, buffer, settings, log):
    conn.send(("done", None))
    try:
        serve(conn, buffer, FakeVllm(mortal="mortal" in str(log)))
    except RuntimeError as error:
        conn.send(("failed", str(error).splitlines()[0]))


def dies_at_start(conn, buffer, settings, log):
    os._exit(3)


def is_silent(conn, buffer, settings, log):
    time.sleep(60)


@pytest.fixture
def peer(request, tmp_path):
    target, log, deadline = request.param
    peer = ProcessPeer(SETTINGS, tmp_path / log, deadline, target)
    yield peer
    peer.close()


@pytest.mark.parametrize("peer", [(host, "log", 30.0)], indirect=True)
def test_verbs_and_weights_larger_than_the_buffer(peer):
    peer.start()
    weights = [("a", torch.randn(5_000_000)), ("b", torch.randn(30, 3).to(torch.bfloat16))]
    peer.load(weights, {}, 1)
    assert peer.probe([1]) == pytest.approx([float(t.double().sum()) for _, t in weights], rel=1e-12)
    assert [(i, a.token_ids) for i, a in peer.sample(ASKS)] == [(i, (i,)) for i in range(6)]
    assert "GOMP_SPINCOUNT" not in os.environ or os.environ["GOMP_SPINCOUNT"] != "20000"
    with pytest.raises(PeerFailed, match=r"^checksum: norm.weight differ from the learner's \(its log: .*log\)$"):
        peer.load(weights, {"norm.weight": 1}, 2)
    assert peer.process is None, "a peer that failed is not asked again"
    with pytest.raises(PeerDied, match="is not running"):
        peer.wake()
    peer.start()
    peer.wake()


@pytest.mark.parametrize("peer", [(host, "mortal", 30.0)], indirect=True)
def test_a_death_in_the_middle_leaves_what_was_answered(peer):
    peer.start()
    found = []
    with pytest.raises(PeerDied, match=r"ended with exit code 7 \(its log: .*mortal\)"):
        for i, _ in peer.sample(ASKS):
            found.append(i)
    assert found == [0, 1, 2]
    peer.start()
    assert [i for i, _ in peer.sample(ASKS[4:])] == [0, 1]


@pytest.mark.parametrize("peer", [(host, "log", 0.5)], indirect=True)
def test_no_sign_of_life_within_the_deadline(peer):
    peer.deadline = 30.0
    peer.start()
    peer.deadline, begin = 0.5, time.perf_counter()
    with pytest.raises(PeerDied, match=r"gave no sign of life for 0 s|for 1 s"):
        peer.sleep()
    assert time.perf_counter() - begin < 10 and peer.process is None


@pytest.mark.parametrize("peer", [(dies_at_start, "log", 30.0)], indirect=True)
def test_a_death_at_start(peer):
    with pytest.raises(PeerDied, match="ended with exit code 3"):
        peer.start()


@pytest.mark.parametrize("peer", [(is_silent, "log", 0.2)], indirect=True)
def test_a_start_may_be_silent_five_times_as_long(peer):
    begin = time.perf_counter()
    with pytest.raises(PeerDied, match=r"no sign of life for 1 s \(rollout.deadline\)"):
        peer.start()
    assert 0.9 < time.perf_counter() - begin < 15
