"""Counter-based random streams by label: draws, ties, sampling noise.

One generator, Philox4x32-10 (Salmon et al., SC 2011). A stream is named by labels joined with "/", starting with the
run's seed, so any number of it can be had without making the ones before: nothing depends on batch make-up, ranks or
resume. Imports nothing of ours.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

WORD = np.uint64(0xFFFFFFFF)


def stream_key(*labels: object) -> int:
    """64-bit key of the stream named by `labels`; a free-form label (a prompt id) must stand last."""
    text = "/".join(map(str, labels)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def philox(key: npt.NDArray[np.uint64], block: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], ...]:
    """The four 32-bit words of each block of each key; both arrays broadcast.

    Counter = (block low, block high, 0, 0).
    """
    k0, k1 = key & WORD, key >> np.uint64(32)
    c0, c1 = block & WORD, block >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    return philox_words((c0, c1, c2, c3), k0, k1)


def philox_words(
    counter: tuple[npt.NDArray[np.uint64], ...], k0: npt.NDArray[np.uint64], k1: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], ...]:
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & WORD, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3


def uniforms(key: int | npt.NDArray[np.uint64], index: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniform numbers in (0, 1), entry j of the stream for each j of `index`; key and index broadcast."""
    j = np.asarray(index, dtype=np.uint64)
    x0, x1, x2, x3 = philox(np.asarray(key, dtype=np.uint64), j >> np.uint64(1))
    even = (j & np.uint64(1)) == 0
    a, b = np.where(even, x0, x2), np.where(even, x1, x3)
    high, low = (a >> np.uint64(5)).astype(np.float64), (b >> np.uint64(6)).astype(np.float64)
    return (high * 2.0**26 + low + 0.5) * 2.0**-53
