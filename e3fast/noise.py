"""Gaussian noise by name: entry j of a stream is the same on any device, in any sharding, in any order of calls.

The generator is that of streams.py, Philox4x32-10, here over torch tensors. Four normal numbers a block, by Box-Muller
from 23-bit uniforms, which fp32 holds exactly; |z| <= 5.77. Imports nothing of ours but the streams' keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = 1 << 18  # blocks worked out together: bounds the int64 scratch


def gaussian(key: int, num: int, device: torch.device | str = "cpu") -> Tensor:
    """Entries 0 .. num - 1 of the stream `key` (streams.stream_key) as normal numbers, (num,) fp32."""
    out = torch.empty(num, device=device)
    for start in range(0, num, 4 * CHUNK):
        stop = min(start + 4 * CHUNK, num)
        blocks = torch.arange(start // 4, -(-stop // 4), device=device)
        out[start:stop] = normals(philox(key, blocks)).flatten()[: stop - start]
    return out


def normals(words: tuple[Tensor, ...]) -> Tensor:
    """Four 32-bit words a block, (B,) each, to (B, 4) normal numbers."""
    v = [((x >> 9).float() + 0.5) * 2.0**-23 for x in words]
    parts = []
    for radius, angle in ((v[0], v[1]), (v[2], v[3])):
        r, turn = (-2 * radius.log()).sqrt(), 2 * torch.pi * angle
        parts += [r * turn.cos(), r * turn.sin()]
    return torch.stack(parts, dim=-1)


def philox(key: int, blocks: Tensor) -> tuple[Tensor, ...]:
    """The four 32-bit words of each block (B,) int64; products wrap in int64, and only their 64 bits are looked at."""
    c0, c1 = blocks & MASK, blocks >> 32
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = key & MASK, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3
