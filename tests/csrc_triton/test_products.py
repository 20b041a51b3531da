"""What stands in where a PyTorch or a GPU lacks the product that widens, and the fp32 switch, on the CPU."""

import threading

import pytest
import torch

from csrc_triton import products
from csrc_triton.products import addmm_fp32_, ieee_fp32, mm_fp32

MATMUL = torch.backends.cuda.matmul
CPU = torch.device("cpu")


@pytest.fixture
def precision():
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


@pytest.fixture
def taken(monkeypatch):
    """CPU tensors taken for a GPU's, with products that widen; the names of those called."""
    mm, addmm, found = torch.mm, torch.addmm, []

    def widening_mm(left, right, *, out_dtype=None, out=None):
        found.append("mm" if out_dtype is not None else "plain mm")
        return mm(left.float(), right.float(), out=out)

    def widening_addmm(self, left, right, *, out_dtype=None, out=None):
        found.append("addmm")
        assert out is self and out_dtype == torch.float32
        return addmm(self, left.float(), right.float(), out=out)

    monkeypatch.setattr(torch, "mm", widening_mm)
    monkeypatch.setattr(torch, "addmm", widening_addmm)
    monkeypatch.setattr(products, "narrow_on_gpu", lambda x: x.dtype != torch.float32)
    monkeypatch.setattr(products, "mm_widens", lambda *_: True)
    monkeypatch.setattr(products, "addmm_widens", lambda *_: True)
    return found


@pytest.mark.parametrize("mm", [True, False])
@pytest.mark.parametrize("addmm", [True, False])
def test_every_route_gives_the_same_product(taken, monkeypatch, mm, addmm):
    monkeypatch.setattr(products, "mm_widens", lambda *_: mm)
    monkeypatch.setattr(products, "addmm_widens", lambda *_: addmm)
    left, right, start = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16(), torch.randn(5, 3)
    out, total = torch.empty(5, 3), start.clone()
    assert mm_fp32(left, right, out) is out and addmm_fp32_(total, left, right) is total
    assert taken == ["mm" if mm else "plain mm", *(["addmm"] if addmm else ["mm"] if mm else [])]
    truth = left.double() @ right.double()
    assert torch.allclose(out.double(), truth, atol=1e-5) and torch.allclose(total.double(), start + truth, atol=1e-5)


def test_a_refusal_is_found_once_and_said_once(monkeypatch):
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("out_dtype is not supported")

    monkeypatch.setattr(torch, "mm", refuse)
    monkeypatch.setattr(torch, "addmm", refuse)
    for probe in (products.mm_widens, products.addmm_widens):
        probe.cache_clear()
    with pytest.warns(UserWarning, match="operands are widened") as warned:
        for _ in range(3):
            assert not products.mm_widens(CPU, torch.bfloat16) and not products.addmm_widens(CPU, torch.bfloat16)
    assert len(warned) == 1 and len(asked) == 2
    for probe in (products.mm_widens, products.addmm_widens):
        probe.cache_clear()


def test_a_product_that_runs_is_taken(taken):
    assert products.runs(products.widening_mm, CPU, torch.bfloat16)
    assert products.runs(products.widening_addmm_, CPU, torch.float16)
    assert taken == ["mm", "addmm"]


@pytest.mark.parametrize("value", ["tf32", "ieee", "none"])
def test_the_users_precision_is_kept(precision, value):
    MATMUL.fp32_precision = value
    with ieee_fp32(True):
        assert MATMUL.fp32_precision == "ieee"
        with ieee_fp32(True):
            assert MATMUL.fp32_precision == "ieee"
        with ieee_fp32(False):
            assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == value
    with pytest.raises(ZeroDivisionError), ieee_fp32(True):
        raise ZeroDivisionError
    assert MATMUL.fp32_precision == value


def test_the_older_switch_is_kept_too(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ieee_fp32(True):
            assert MATMUL.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high" and MATMUL.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_thread_at_a_time_holds_the_switch(precision):
    MATMUL.fp32_precision = "tf32"
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with ieee_fp32(True):
            inside.set()
            leave.wait(10)

    def second():
        with ieee_fp32(True):
            seen.append(MATMUL.fp32_precision)

    threads = [threading.Thread(target=run) for run in (first, second)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive() and not seen
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == ["ieee"] and MATMUL.fp32_precision == "tf32"
