"""The gate on machine code says no to each thing it looks for; and its table covers the table of configurations."""

import pytest

pytest.importorskip("triton")

from benchmarks import aot
from csrc_triton.launch import CONFIGS

CLEAN = {name: 0 for name in (*aot.OPCODES, "stack")} | {"HGMMA": 8, "UTMALDG": 3, "UTMASTG": 1, "matrix": 8}
CLEAN |= {"registers": 168, "shared": 200 << 10, "instructions": 1000, "specialized": True, "MUFU": 9}


def built(figures):
    case = next(case for case in aot.cases() if case.kernel == "stats_store" and case.variant == "entropy")
    return aot.Built(case, CONFIGS["stats_store", 90], 90, CLEAN | figures)


def test_a_clean_kernel_passes():
    assert aot.faults(built({}), {}) == []
    assert aot.faults(built({}), {built({}).key: 1000}) == []


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"stack": 8}, "stack 8"),
        ({"LDL": 2}, "LDL 2"),
        ({"STL": 1}, "STL 1"),
        ({"HGMMA": 0}, "no HGMMA"),
        ({"HMMA": 4}, "HMMA 4"),
        ({"UTMALDG": 0}, "no UTMALDG"),
        ({"UTMASTG": 0}, "no UTMASTG"),
        ({"specialized": False}, "not specialised"),
        ({"shared": (227 << 10) + 1}, "shared memory"),
        ({"instructions": 1201}, "instructions 1201"),
    ],
)
def test_every_fault_is_named(figures, word):
    one = built(figures)
    found = aot.faults(one, {one.key: 1000})
    assert len(found) == 1 and word in found[0]


def test_the_written_table_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "PROFILE", tmp_path / "aot.md")
    assert aot.committed_instructions() == {}
    aot.write_profile([built({"instructions": 4321})])
    assert aot.committed_instructions() == {"stats_store | entropy | sm_90a": 4321}


def test_every_line_of_the_configurations_is_compiled():
    used = {aot.choose_config(case, arch) for case in aot.cases() for arch in aot.ARCHES}
    assert set(CONFIGS.values()) <= used
    assert {case.kernel for case in aot.cases() if case.quick} >= {case.kernel for case in aot.cases()}
