"""The random streams give their known numbers."""

import numpy as np

from e3fast.streams import philox_words, stream_key, uniforms


def u64(*values):
    return tuple(np.array([v], dtype=np.uint64) for v in values)


def test_known_answers_of_philox4x32_10():
    zero = philox_words(u64(0, 0, 0, 0), *u64(0, 0))
    assert [int(x[0]) for x in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox_words(u64(*[0xFFFFFFFF] * 4), *u64(0xFFFFFFFF, 0xFFFFFFFF))
    assert [int(x[0]) for x in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_stream_vector():
    key = stream_key(7, "budget-ties", 1)
    assert key == 898541177197407230
    assert np.allclose(uniforms(key, range(5)), [0.216432, 0.470244, 0.581460, 0.369669, 0.409384], atol=5e-7)


def test_an_entry_does_not_depend_on_what_else_is_asked():
    key = stream_key(3, "x")
    alone = [float(uniforms(key, [j])[0]) for j in range(9)]
    assert alone == uniforms(key, range(9)).tolist()
    two = uniforms(np.array([[key], [key + 1]], dtype=np.uint64), np.arange(9)[None])
    assert two[0].tolist() == alone and two[1].tolist() == uniforms(key + 1, range(9)).tolist()


def test_uniform():
    u = uniforms(stream_key(0, "u"), range(20000))
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.002
