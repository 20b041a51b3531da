"""The sampler draws from softmax(z / tau), each row by its own stream, and says the draw's log-probability."""

import pytest
import torch

from e3fast.rollout.sampler import Sampler, pick


def test_draws_follow_the_distribution():
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(300) * 2, -1)
    n = 40_000
    drawn = pick(probs.expand(n, -1), (torch.arange(n) + 0.5).double() / n)
    counts = torch.bincount(drawn, minlength=300) / n
    assert float((counts - probs).abs().max()) < 2 / n


@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000])
def test_never_a_token_of_probability_zero(width):
    probs = torch.zeros(3, width)
    probs[:, width // 2] = 0.5
    probs[:, 0] += 0.5
    for u in (1e-16, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert bool((probs.gather(1, pick(probs, torch.full((3,), u).double())[:, None]) > 0).all())


def test_temperatures_streams_and_logprobs():
    torch.manual_seed(1)
    z = torch.randn(4, 50) * 3
    taus = torch.tensor([0.6, 1.0, 1.3, 0.0])
    sampler = Sampler(taus, torch.rand(4, 3).double())
    for _ in range(3):
        token = sampler(torch.zeros(4, 1), z).argmax(-1)
        scale = torch.where(taus == 0, 1.0, taus)[:, None]
        want = torch.log_softmax(z / scale, -1).gather(1, token[:, None])[:, 0]
        torch.testing.assert_close(sampler.logprobs[-1], want, atol=1e-5, rtol=1e-5)
        assert token[3] == z[3].argmax()
