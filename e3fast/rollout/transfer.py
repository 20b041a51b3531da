"""Weights on their way from the learner to an engine, one tensor at a time, and the checksums that prove them.

To a process of this machine through one buffer of shared memory (on a GPU a handle alone travels, CUDA IPC); to
another machine through a socket. Neither end holds more than the tensor under way, whatever the model's size.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 1 << 24
CHECKED_BYTES = 1 << 17  # of each tensor that a checksum is taken of
CHECKED_TENSORS = 8


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, (n,) uint8."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def empty(head: list[Any]) -> Tensor:
    _, dtype, shape = head
    return torch.empty(shape, dtype=getattr(torch, dtype))


def head_of(name: str, tensor: Tensor) -> list[Any]:
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


# ---- one machine ----


def send_shared(
    conn: Connection, buffer: Tensor, weights: Iterable[tuple[str, Tensor]], wait: Callable[[], object]
) -> None:
    """Through `buffer`, shared memory of (n,) uint8. `wait` returns when the other end has taken a piece."""
    for name, tensor in weights:
        if tensor.is_cuda:
            conn.send(("handle", name, tensor.detach()))
            wait()
            continue
        conn.send(("tensor", head_of(name, tensor)))
        for piece in flat_bytes(tensor).split(len(buffer)):
            buffer[: len(piece)] = piece
            conn.send(("piece", len(piece)))
            wait()
    conn.send(("end",))


def receive_shared(conn: Connection, buffer: Tensor, taken: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """The other end of `send_shared`; `taken` tells it that a piece was taken."""
    while (message := conn.recv())[0] != "end":
        if message[0] == "handle":
            taken()
            yield message[1], message[2]
            continue
        head = message[1]
        tensor = empty(head)
        rest = flat_bytes(tensor)
        while len(rest):
            _, size = conn.recv()
            rest[:size] = buffer[:size]
            rest = rest[size:]
            taken()
        yield head[0], tensor


# ---- over a network ----


def serve_once(server: socket.socket, token: str, weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
    """Send all weights to the first caller that knows the token. TimeoutError, OSError."""
    server.settimeout(deadline)
    link, _ = server.accept()
    with link:
        link.settimeout(deadline)
        if not hmac.compare_digest(read_exactly(link, len(token)), token.encode()):
            raise ConnectionError("a caller without the token asked for the weights")
        for name, tensor in weights:
            head = json.dumps(head_of(name, tensor)).encode()
            link.sendall(struct.pack("!I", len(head)) + head)
            link.sendall(flat_bytes(tensor.cpu()).numpy().data)
        link.sendall(struct.pack("!I", 0))


def fetch(host: str, port: int, token: str, deadline: float) -> Iterator[tuple[str, Tensor]]:
    """The other end of `serve_once`."""
    with socket.create_connection((host, port), deadline) as link:
        link.sendall(token.encode())
        while size := struct.unpack("!I", read_exactly(link, 4))[0]:
            head = json.loads(read_exactly(link, size))
            tensor = empty(head)
            fill(link, flat_bytes(tensor).numpy().data)
            yield head[0], tensor


def read_exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    fill(link, memoryview(data))
    return bytes(data)


def fill(link: socket.socket, view: memoryview) -> None:
    while len(view):
        if not (taken := link.recv_into(view)):
            raise ConnectionError("the other end of the weight transfer has closed")
        view = view[taken:]


# ---- checksums ----


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's first 128 KiB."""
    size = CHECKED_BYTES // tensor.element_size()
    return zlib.crc32(flat_bytes(tensor.detach().view(-1)[:size].cpu()).numpy().data)


def checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Of a few tensors that an engine keeps as they are: vectors (norms) from all depths, and the embedding.

    Matrices of linear layers are fused and packed by engines; that they arrived, the probe shows.
    """
    named = [(name, tensor) for name, tensor in weights if tensor.ndim == 1 or "embed_tokens" in name]
    vectors = [pair for pair in named if pair[1].ndim == 1 and "norm" in pair[0]]
    every = max(1, -(-len(vectors) // CHECKED_TENSORS))
    chosen = vectors[::-1][::every] + [pair for pair in named if pair[1].ndim == 2]
    return {name: checksum(tensor) for name, tensor in chosen}


def compare_checksums(params: Mapping[str, Tensor], expected: Mapping[str, int]) -> None:
    """RuntimeError that names the tensors that differ. A name the engine does not have says nothing."""
    wrong = [name for name, value in expected.items() if name in params and checksum(params[name]) != value]
    if wrong:
        raise RuntimeError(f"checksum: {', '.join(wrong)} differ from the learner's")
