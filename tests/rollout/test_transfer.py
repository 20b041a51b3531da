"""Weights arrive bit for bit, through shared memory and through a socket; a caller without the token gets none."""

import socket
import threading

import pytest
import torch

from e3fast.rollout.transfer import (
    checksum,
    checksums,
    compare_checksums,
    fetch,
    receive_shared,
    send_shared,
    serve_once,
)

TENSORS = [
    ("a", torch.arange(1000.0)),
    ("b", torch.randn(33, 7).to(torch.bfloat16)),
    ("scalar", torch.tensor(3.5)),
    ("turned", torch.randn(5, 9).T),
    ("frozen", torch.nn.Parameter(torch.randn(3))),
]


def in_thread(work, *args):
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def check(found):
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    for (_, got), (_, want) in zip(found, TENSORS, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want.detach())


@pytest.mark.parametrize("size", [16, 4096, 1 << 20])
def test_through_one_buffer_whatever_its_size(size):
    ours, theirs = torch.multiprocessing.Pipe()
    buffer = torch.empty(size, dtype=torch.uint8)
    sender = in_thread(send_shared, ours, buffer, TENSORS, ours.recv)
    check(list(receive_shared(theirs, buffer, lambda: theirs.send("taken"))))
    sender.join(5)


def test_through_a_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = in_thread(serve_once, server, "t" * 32, TENSORS, 5.0)
        check(list(fetch("127.0.0.1", server.getsockname()[1], "t" * 32, 5.0)))
        sender.join(5)


def test_a_caller_without_the_token_gets_no_weights():
    with socket.create_server(("127.0.0.1", 0)) as server:
        failed = []

        def serve():
            try:
                serve_once(server, "t" * 32, TENSORS, 5.0)
            except ConnectionError as error:
                failed.append(str(error))

        sender = in_thread(serve)
        with pytest.raises(ConnectionError):
            list(fetch("127.0.0.1", server.getsockname()[1], "x" * 32, 5.0))
        sender.join(5)
        assert failed == ["a caller without the token asked for the weights"]


def test_nobody_calls_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        serve_once(server, "t" * 32, TENSORS, 0.05)


def test_a_sender_that_ends_early_is_no_end_of_weights():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def broken():
            raise RuntimeError("the learner died")
            yield

        def serve():
            with pytest.raises(RuntimeError):
                serve_once(server, "t" * 32, broken(), 5.0)

        sender = in_thread(serve)
        with pytest.raises(ConnectionError, match="has closed"):
            list(fetch("127.0.0.1", server.getsockname()[1], "t" * 32, 5.0))
        sender.join(5)


def test_checksums_tell_one_bit_and_name_the_tensor():
    weights = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "embed_tokens.weight": torch.randn(300, 400)}
    expected = checksums(weights.items())
    compare_checksums({**weights, "other": torch.ones(2)}, expected)
    weights["norm.weight"][7] += 2**-7
    with pytest.raises(RuntimeError, match=r"^checksum: norm.weight differ from the learner's"):
        compare_checksums(weights, expected)
    compare_checksums({"renamed": torch.ones(1)}, expected)


def test_a_padded_vocabulary_has_the_same_checksum():
    """Engines pad the embedding's rows."""
    rows = torch.randn(300, 400)
    assert checksum(torch.cat([rows, torch.zeros(20, 400)])) == checksum(rows)
