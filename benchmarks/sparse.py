"""The sparse backward on real hidden states of the demo model, at two entropies: what it saves and what it loses.

    python -m benchmarks.sparse [--save]

2,048 tokens sampled from SmolLM2-135M at temperature 1 and at 0.5, where it is as sure as a model after training;
the loss is taken at the same temperature. Times are of forward and backward, dense and sparse in turn; errors are
relative Frobenius norms against fp64, of gradients before they are rounded to bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Row, save, show
from csrc_triton.backends import open_backend
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import split
from csrc_triton.sparse import SMALLEST

TOKENS, REPEATS = 2048, 5
TOLERANCES = (0.01, 0.05)
QUESTIONS = (
    "Tell me a story about a fox.",
    "What is 12 + 35? Explain.",
    "Write a short poem about the sea.",
    "How do plants make food?",
    "Explain what a prime number is.",
    "Name three animals and describe them.",
    "What is the capital of France and why?",
    "Give me a recipe for soup.",
)


@dataclasses.dataclass(frozen=True)
class States:
    hidden: Tensor  # (T, H) bf16
    weight: Tensor  # (V, H) bf16
    targets: Tensor  # (T,)
    temperature: float
    coefficients: Tensor  # (T,) what a loss hands back


def real_states(temperature: float) -> States:
    """Final hidden states before each sampled token, and the tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from e3fast.demo_model import demo_checkpoint

    folder = demo_checkpoint("demo:smollm2-135m")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    chat = [[{"role": "user", "content": text}] for text in QUESTIONS * 4]
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in chat]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    length, start = TOKENS // len(prompts), batch.input_ids.shape[1]
    torch.manual_seed(0)
    options = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "max_new_tokens": length,
        "min_new_tokens": length,
    }
    with torch.no_grad():
        ids = model.generate(**batch, **options)
        mask = torch.cat([batch.attention_mask, torch.ones(len(prompts), length, dtype=torch.long)], 1)
        hidden = model.model(ids, attention_mask=mask).last_hidden_state[:, start - 1 : -1]
    coefficients = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1)) / TOKENS
    flat = hidden.reshape(TOKENS, -1).contiguous()
    return States(flat, model.lm_head.weight.detach(), ids[:, start:].reshape(-1), temperature, coefficients)


def run(states: States, tolerance: float | None) -> tuple[float, Tensor, Tensor, int]:
    """Seconds, dX, dW, and how many chunks the sparse backward handed to the dense one."""
    start = time.perf_counter()
    backend = open_backend("torch", Head(states.weight, None, 1.0, None), states.hidden, None, tolerance)
    dx, dw = (torch.zeros_like(x, dtype=torch.float32) for x in (states.hidden, states.weight))
    for part in split(torch.arange(TOKENS), backend.num_rows):
        rows = Rows(states.hidden[part], torch.full((len(part),), states.temperature), states.targets[part])
        backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
        found = backend.backward(None, Upstream(states.coefficients[part], None, None), HeadGrads(dw, None, True))
        assert found is not None
        dx[part] = found
    return time.perf_counter() - start, dx, dw, getattr(backend, "num_dense", 0)


def truth(states: States) -> tuple[Tensor, Tensor, dict[str, float]]:
    """fp64 gradients; entropy in nats, entries above the limit a token and the mass below it."""
    w, dx, dw = states.weight.double(), [], 0
    entropy = kept = dropped = 0.0
    for part in torch.arange(TOKENS).split(256):
        x = states.hidden[part].double()
        log_p = torch.log_softmax(x @ w.T / states.temperature, -1)
        p, a = log_p.exp(), states.coefficients[part, None].double() / states.temperature
        entropy -= float((p * log_p).sum()) / TOKENS
        kept += float((p > SMALLEST).sum()) / TOKENS
        dropped += float(p[p <= SMALLEST].sum()) / TOKENS
        dz = -a * p
        dz[torch.arange(len(part)), states.targets[part]] += a[:, 0]
        dx.append(dz @ w)
        dw = dw + dz.T @ x
    return torch.cat(dx), torch.as_tensor(dw), {"entropy": entropy, "kept_a_token": kept, "mass_dropped": dropped}


def measure(temperature: float) -> list[Row]:
    states, case = real_states(temperature), f"smollm2-T{TOKENS}-temperature{temperature}"
    true_dx, true_dw, figures = truth(states)
    rows = [
        Row(case, "distribution", name, [value], "nats" if name == "entropy" else "") for name, value in figures.items()
    ]
    tolerances = (None, *TOLERANCES)
    for tolerance in tolerances:
        run(states, tolerance)  # warm-up
    times: dict[float | None, list[float]] = {tolerance: [] for tolerance in tolerances}
    off = lambda got, want: float((got.double() - want).norm() / want.norm())  # noqa: E731
    for _ in range(REPEATS):
        for tolerance in tolerances:
            times[tolerance].append(run(states, tolerance)[0])
    for tolerance in tolerances:
        _, dx, dw, num_dense = run(states, tolerance)
        name = "dense" if tolerance is None else f"sparse, tolerance {tolerance}"
        rows.append(Row(case, name, "ms", [1e3 * x for x in times[tolerance]], "ms"))
        ratios = [x / y for x, y in zip(times[tolerance], times[None], strict=True)]
        rows.append(Row(case, name, "time_over_dense", ratios, "x"))
        rows.append(Row(case, name, "dx_error", [off(dx, true_dx)], "rel"))
        rows.append(Row(case, name, "dw_error", [off(dw, true_dw)], "rel"))
        rows.append(Row(case, name, "dense_chunks", [float(num_dense)], ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/kernels.csv")
    args = parser.parse_args()
    rows = [row for temperature in (1.0, 0.5) for row in measure(temperature)]
    show("sparse backward", rows)
    if args.save:
        save("kernels", rows)


if __name__ == "__main__":
    main()
