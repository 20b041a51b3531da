"""Packed attention cannot leak.

Packed equals alone, values and gradients, whatever stands beside.
"""

import pytest
import torch

from e3fast import attention
from e3fast.model import check_lengths, check_packing, packed_hidden
from e3fast.packing import pack
from tests.samples import make_samples
from tests.tiny import make_model

SHAPE = [(9, [4, 11, 6]), (1, [5, 5]), (17, [3]), (30, [25, 2, 8, 19])]
TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5}  # transformers norms in fp32 whatever the model is


def packed(samples, sharing):
    (micro_batch,) = pack(samples, [1.0] * len(samples), 10_000, 1, sharing=sharing).micro_batches[0]
    return micro_batch


def alone(model, sample):
    """Plain transformers, one sequence, its own mask."""
    model.config._attn_implementation = "eager"
    ids = torch.from_numpy(sample.token_ids)[None]
    out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    model.config._attn_implementation = "e3fast"
    return out


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("small_block", [0, attention.SMALL_BLOCK])
def test_packed_equals_alone(sharing, dtype, small_block, monkeypatch):
    monkeypatch.setattr(attention, "SMALL_BLOCK", small_block)
    model, samples = make_model(dtype), make_samples(SHAPE)
    micro_batch = packed(samples, sharing)
    with torch.no_grad():
        hidden = packed_hidden(model, micro_batch)
        for n, i in enumerate(micro_batch.sample_of.tolist()):
            if i >= 0:
                at = slice(int(micro_batch.cu_seqlens[n]), int(micro_batch.cu_seqlens[n + 1]))
                want = alone(model, samples[i])[micro_batch.position_ids[at]]
                torch.testing.assert_close(hidden[at], want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_a_poisoned_neighbour_changes_nothing(sharing, poison):
    model, samples = make_model(torch.float64), make_samples(SHAPE)
    micro_batch = packed(samples, sharing)
    ends, prefix_of = micro_batch.cu_seqlens.tolist(), micro_batch.prefix_of.tolist()
    with torch.no_grad():
        clean = packed_hidden(model, micro_batch)
        for n in range(len(prefix_of)):
            rows = slice(ends[n], ends[n + 1])
            handle = model.base_model.embed_tokens.register_forward_hook(fill_rows(rows, poison))
            dirty = packed_hidden(model, micro_batch)
            handle.remove()
            hit = torch.zeros(len(clean), dtype=torch.bool)
            for m, home in enumerate(prefix_of):
                if m == n or home == n:
                    hit[ends[m] : ends[m + 1]] = True
            assert torch.equal(dirty[~hit], clean[~hit])
            assert not torch.isclose(dirty[hit], clean[hit]).all(-1).any()


def fill_rows(rows, value):
    def hook(module, args, out):
        out = out.clone()
        out[0, rows] = value
        return out

    return hook


@pytest.mark.parametrize("sharing", [False, True])
def test_gradients_stay_inside_a_sample(sharing):
    model, samples = make_model(torch.float64), make_samples(SHAPE)
    micro_batch = packed(samples, sharing)
    ends, prefix_of = micro_batch.cu_seqlens.tolist(), micro_batch.prefix_of.tolist()
    for n in range(len(prefix_of)):
        seen = {}

        def hook(module, args, out, seen=seen):
            seen["x"] = out.detach().requires_grad_()
            return seen["x"]

        handle = model.base_model.embed_tokens.register_forward_hook(hook)
        packed_hidden(model, micro_batch)[ends[n] : ends[n + 1]].square().sum().backward()
        handle.remove()
        own = torch.zeros(ends[-1], dtype=torch.bool)
        for m in {n, prefix_of[n]} - {-1}:
            own[ends[m] : ends[m + 1]] = True
        grad = seen["x"].grad[0]
        assert grad[own].abs().amin(0).max() > 0 and torch.equal(grad[~own], torch.zeros_like(grad[~own]))


def test_order_of_samples_does_not_matter():
    model, samples = make_model(torch.float64), make_samples(SHAPE)
    found = []
    for order in (range(len(samples)), reversed(range(len(samples)))):
        chosen = [samples[i] for i in order]
        micro_batch = packed(chosen, True)
        with torch.no_grad():
            hidden = packed_hidden(model, micro_batch)
        ends = micro_batch.cu_seqlens.tolist()
        found.append(
            {
                chosen[i].token_ids.tobytes(): hidden[ends[n] : ends[n + 1]]
                for n, i in enumerate(micro_batch.sample_of.tolist())
                if i >= 0
            }
        )
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], atol=2e-6, rtol=2e-6)


def test_what_packed_attention_cannot_do_is_refused():
    plan = attention.plan_attention(torch.tensor([0, 5]), torch.tensor([-1]))
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"does not support {name}"):
            attention.refuse_unknown(plan, {name: 30.0})
    with pytest.raises(ValueError, match="sliding_window=4"):
        attention.refuse_unknown(plan, {"sliding_window": 4})
    attention.refuse_unknown(plan, {"sliding_window": 5, "softcap": None})


def test_a_model_that_leaks_when_packed_is_refused(monkeypatch):
    model = make_model()
    check_packing(model)
    leaky = attention.plan_attention(torch.tensor([0, 12]), torch.tensor([-1]))
    monkeypatch.setattr(attention, "plan_attention", lambda *args: leaky)
    with pytest.raises(ValueError, match="other hidden states when samples are packed"):
        check_packing(model)


def test_a_window_shorter_than_the_samples_is_refused():
    model = make_model()
    model.config.sliding_window = 40
    check_lengths(model, 20, 20)
    with pytest.raises(ValueError, match="attention window of 40"):
        check_lengths(model, 20, 21)
