"""A vLLM server that is not there, is late, refuses, or was started anew: each within the deadline and in words."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from e3fast.config import RolloutConfig, RunConfig
from e3fast.rollout.open_engine import check_engine
from e3fast.rollout.peers import PeerDied, PeerFailed
from e3fast.rollout.vllm_api import Ask
from e3fast.rollout.vllm_server import ServerPeer

ASKS = [Ask((1, 2), 1.0, 4, seed) for seed in range(5)]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply()

    def reply(self):
        answer = self.server.answers[self.path]
        status, body = answer() if callable(answer) else (200, answer)
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args):
        pass


def completion(tokens=(7, 8), reason="stop", logprobs=(-1.0, None)):
    """Two events, as a stream has them."""
    pieces = [
        {"token_ids": [token], "logprobs": {"token_logprobs": [value]}, "finish_reason": None}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    pieces[-1]["finish_reason"] = reason
    return (
        b"".join(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n" for piece in pieces)
        + b"data: [DONE]\n"
    )


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers = {
        "/health": {},
        "/v1/models": {"data": [{"id": "model", "max_model_len": 64}]},
        "/init_weight_transfer_engine": {},
        "/weight_info": {"weight_version": ""},
        "/v1/completions": completion(),
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def peer(server, length=64, deadline=0.4):
    return ServerPeer(f"http://127.0.0.1:{server.server_port}", length, 4, [0], deadline)


def test_completions_come_back_by_their_index(server):
    asking = peer(server, deadline=10.0)
    asking.start()
    found = dict(asking.sample(ASKS))
    assert sorted(found) == [0, 1, 2, 3, 4] and found[0].token_ids == (7, 8) and found[0].finish_reason == "stop"
    assert found[0].logprobs[0] == -1.0 and found[0].logprobs[1] != found[0].logprobs[1], "None is nan"


def test_nobody_at_the_address():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as gone:
        url = f"http://127.0.0.1:{gone.server_port}"
    begin = time.perf_counter()
    with pytest.raises(PeerDied, match=r"no vLLM server at http.* within 1 s .*start it by `e3fast serve RUN.toml`"):
        ServerPeer(url, 64, 4, [0], 0.2).start()
    assert time.perf_counter() - begin < 5


def test_a_server_that_never_answers(server):
    server.answers["/v1/completions"] = lambda: (time.sleep(3), (200, completion()))[1]
    asking = peer(server)
    begin = time.perf_counter()
    with pytest.raises(PeerDied, match=r"gave no answer for 0 s \(rollout.deadline\)"):
        list(asking.sample(ASKS[:2]))
    assert time.perf_counter() - begin < 2.5


def test_a_context_that_is_too_short(server):
    with pytest.raises(PeerFailed, match="has a context of 64 tokens, the run needs 100"):
        peer(server, length=100).start()


def test_its_refusal_is_given_in_its_own_words(server):
    server.answers["/v1/completions"] = lambda: (400, {"error": {"message": "bad temperature"}})
    with pytest.raises(PeerFailed, match=r"answered /v1/completions with 400: .*bad temperature"):
        list(peer(server).sample(ASKS))


def test_a_stream_that_breaks_off_is_no_short_completion(server):
    server.answers["/v1/completions"] = completion(reason=None)
    with pytest.raises(PeerDied, match="broke off in the middle of a completion"):
        list(peer(server).sample(ASKS))


def test_answers_of_a_server_that_was_started_anew_are_thrown_away(server):
    """Between the two looks at its version it lost the policy's weights: nothing of the batch counts."""
    versions = iter(["", "nothing"])
    server.answers["/weight_info"] = lambda: (200, {"weight_version": next(versions)})
    found = []
    with pytest.raises(PeerDied, match="has other weights than it was given"):
        found += peer(server).sample(ASKS)
    assert found == []


def test_a_server_that_does_not_fetch_the_weights(server):
    server.answers |= {"/start_weight_update": {}, "/update_weights": lambda: (500, {"error": "checksum: norm differ"})}
    begin = time.perf_counter()
    with pytest.raises(PeerFailed, match=r"answered /update_weights with 500: .*checksum: norm differ"):
        peer(server).load([], {}, 1)
    assert time.perf_counter() - begin < 5


def test_a_run_file_needs_its_address():
    with pytest.raises(ValueError, match=r"needs rollout.server_url, for example"):
        check_engine(RunConfig(rollout=RolloutConfig(engine="vllm-server")))
    with pytest.raises(ValueError, match=r"rollout.server_url must be http://host:port"):
        RolloutConfig(server_url="localhost:8000")
