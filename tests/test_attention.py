"""Packed attention cannot leak.

Packed equals alone, values and gradients, whatever stands beside.
"""

import pytest
import torch

from e3fast import attention, attention_plan
from e3fast import model as model_module
from e3fast.attention_plan import AttentionPlan
from e3fast.model import check_packing, packed_hidden
from e3fast.packing import pack
from tests.samples import make_samples
from tests.tiny import FAMILIES, make_family, make_model

SHAPE = [(9, [4, 11, 6]), (1, [5, 5]), (17, [3]), (30, [25, 2, 8, 19])]
TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5}  # transformers norms in fp32 whatever the model is


def packed(samples, sharing):
    (micro_batch,) = pack(samples, [1.0] * len(samples), 10_000, 1, sharing=sharing).micro_batches[0]
    return micro_batch


def alone(model, sample):
    """Plain transformers, one sequence, its own mask."""
    ids = torch.from_numpy(sample.token_ids)[None]
    model.config._attn_implementation = "eager"
    try:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    finally:
        model.config._attn_implementation = "e3fast"


def check_against_alone(model, samples, micro_batch, tolerance):
    with torch.no_grad():
        hidden = packed_hidden(model, micro_batch)
        for n, i in enumerate(micro_batch.sample_of.tolist()):
            if i >= 0:
                at = slice(int(micro_batch.cu_seqlens[n]), int(micro_batch.cu_seqlens[n + 1]))
                want = alone(model, samples[i])[micro_batch.position_ids[at]]
                torch.testing.assert_close(hidden[at], want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [4, 128])
@pytest.mark.parametrize("spare", [0, 4096])
def test_packed_equals_alone(sharing, dtype, tile, spare, monkeypatch):
    monkeypatch.setattr(attention_plan, "TILE", tile)
    monkeypatch.setattr(attention_plan, "SPARE", spare)
    samples = make_samples(SHAPE)
    check_against_alone(make_model(dtype), samples, packed(samples, sharing), TOLERANCE[dtype])


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("tile", [4, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_packed_equals_alone(family, tile, sharing, monkeypatch):
    """Windows and softcaps too: the samples are longer than the window, and logits reach the cap."""
    monkeypatch.setattr(attention_plan, "TILE", tile)
    model, samples = make_family(family), make_samples(SHAPE)
    check_packing(model)
    check_against_alone(model, samples, packed(samples, sharing), TOLERANCE[torch.float64])


def weigh(hidden, targets):
    """A number that every asked hidden state moves in its own way."""
    return (hidden * torch.cos(targets[:, None] * torch.arange(1, hidden.shape[1] + 1))).sum()


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tile, spare", [(4, 4096), (128, 0)])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_packed_has_the_gradient_of_samples_alone(family, sharing, tile, spare, monkeypatch):
    monkeypatch.setattr(attention_plan, "TILE", tile)
    monkeypatch.setattr(attention_plan, "SPARE", spare)
    model, samples = make_family(family), make_samples(SHAPE)
    micro_batch = packed(samples, sharing)
    rows = micro_batch.loss_mask.nonzero()[:, 0]
    found = gradients(model, weigh(packed_hidden(model, micro_batch)[rows], micro_batch.targets[rows]))
    asked = [(s, s.num_prompt_tokens) for s in samples]
    want = gradients(
        model, sum(weigh(alone(model, s)[p - 1 : -1], torch.from_numpy(s.token_ids[p:])) for s, p in asked)
    )
    assert found.keys() == want.keys() and len(want) > 10
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6 * float(grad.abs().max()), rtol=0, msg=name)


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
    for name in ("s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"does not support {name}"):
            attention.refuse_unknown({name: 30.0})
    attention.refuse_unknown({"sliding_window": 5, "softcap": 2.0, "s_aux": None})


def test_a_model_that_leaks_when_packed_is_refused(monkeypatch):
    model = make_model()
    check_packing(model)
    leaky = AttentionPlan(torch.tensor([0, 14]), torch.tensor([-1]))
    monkeypatch.setattr(model_module, "AttentionPlan", lambda *args: leaky)
    with pytest.raises(ValueError, match="other hidden states when samples are packed"):
        check_packing(model)
