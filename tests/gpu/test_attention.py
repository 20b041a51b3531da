"""Variable-length kernels on a GPU equal tiles, values and gradients, with prefixes and windows."""

import pytest
import torch

from e3fast.attention_plan import AttentionPlan
from e3fast.attention_tiles import Form, tiled_attention
from e3fast.attention_varlen import find_kernel, varlen_attention
from tests.test_attention_tiles import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_varlen_equals_tiles(window, softcap):
    ends, prefix_of = make_plan([(115, [300, 17, 129]), (0, [409]), (2000, [550, 64])])
    form, generator = Form(16, 8, 128**-0.5, softcap, window), torch.Generator("cuda").manual_seed(0)
    draw = lambda heads: torch.randn(int(ends[-1]), heads, 128, device="cuda", generator=generator)  # noqa: E731
    inputs, upstream = [draw(16), draw(8), draw(8)], draw(16)
    plan = AttentionPlan(ends.cuda(), prefix_of.cuda())
    if not find_kernel(inputs[0].bfloat16(), plan, form):
        pytest.skip("no kernel here takes these inputs: PyTorch's has no softcap, flash-attn 2.6 is not installed")

    def run(attend, dtype):
        xs = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = attend(*xs).flatten(1)
        return (out, *torch.autograd.grad(out, xs, upstream.flatten(1).to(dtype)))

    tiles = lambda *xs: tiled_attention(*(x.flatten(1) for x in xs), plan, form)  # noqa: E731
    truth, eager = run(tiles, torch.float64), run(tiles, torch.bfloat16)
    ours = run(lambda *xs: varlen_attention(*xs, plan, form), torch.bfloat16)
    for exact, mine, other in zip(truth, ours, eager, strict=True):
        error = lambda x, exact=exact: float((x.double() - exact).norm() / exact.norm())  # noqa: E731
        assert error(mine) < 1.05 * error(other)
