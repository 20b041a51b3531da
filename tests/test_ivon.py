"""IVON's step: worked values, its clip, averages over draws, and a frozen precision without noise gradients."""

import pytest
import torch

from e3fast.ivon import Ivon, IvonConfig


def one_step(optimizer, param, grad, noise):
    param.grad = torch.full_like(param, grad)
    if noise is not None:
        optimizer.gather(param, torch.full_like(param, noise))
        optimizer.spread()
    before = param.item()
    optimizer.step()
    optimizer.zero_grad()
    return before - param.item()


def start(**knobs):
    param = torch.full((1,), 0.02, dtype=torch.float64, requires_grad=True)
    return param, Ivon([param], IvonConfig(**knobs))


def deviation(optimizer, param):
    hess = optimizer.state[param]["hess"].item() if optimizer.state[param] else optimizer.config.hess_init
    return (optimizer.config.ess * (hess + optimizer.config.prior_precision)) ** -0.5


def test_two_steps():
    param, optimizer = start()
    assert deviation(optimizer, param) == pytest.approx(9.995004e-4, rel=1e-6)
    change = one_step(optimizer, param, 5e-7, deviation(optimizer, param))
    assert change == pytest.approx(5.200260e-7, rel=1e-6)
    assert optimizer.state[param]["hess"].item() == pytest.approx(9.999500262e-4, rel=1e-9)
    assert param.item() == pytest.approx(0.019999479974, rel=1e-10)
    change = one_step(optimizer, param, -3e-7, -0.5 * deviation(optimizer, param))
    assert change == pytest.approx(9.896019e-8, rel=1e-5)
    assert optimizer.state[param]["hess"].item() == pytest.approx(9.998650420e-4, rel=1e-9)
    assert param.item() == pytest.approx(0.019999381014, rel=1e-10)


def test_the_clip_binds():
    param, optimizer = start()
    assert one_step(optimizer, param, 2e-4, deviation(optimizer, param)) == pytest.approx(1.001e-6, rel=1e-6)
    assert optimizer.state[param]["hess"].item() == pytest.approx(1.020108003e-3, rel=1e-8)


def test_gradients_at_the_mean_leave_the_precision_alone():
    param, optimizer = start()
    one_step(optimizer, param, 5e-7, None)
    assert optimizer.state[param]["hess"].item() == 1e-3 and optimizer.state[param]["step"].item() == 1


def test_draws_add_up():
    """Two draws with half the gradient each and the same noise are one with the whole."""
    results = []
    for parts in ([4e-7], [2e-7, 2e-7]):
        param, optimizer = start()
        for grad in parts:
            param.grad = torch.full_like(param, grad)
            optimizer.gather(param, torch.full_like(param, 1e-3))
        optimizer.spread()
        optimizer.step()
        results.append((param.item(), optimizer.state[param]["hess"].item()))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
