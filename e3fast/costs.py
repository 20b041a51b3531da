"""What a micro-batch costs: start values from a model's config, and their refit from measured times. No torch here.

A sample alone is laid out as its L = P + C tokens. Samples behind one prompt are laid out as a prefix of q = P - 1
tokens and suffixes of u = C + 1 (a suffix repeats the last prompt token), so q + u = L: every member pays its suffix
and its attention to the prefix, and the prefix is paid once.

Start values count FLOP of a forward pass, one multiply-add being two. With a backward pass all of them grow by one
factor, which changes no plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from e3fast.types import Coefficients, FloatArray, IntArray

MAX_CONDITION = 100.0  # columns of unit length; beyond it the measured times cannot tell the coefficients apart
MIN_R2 = 0.9
RIDGE = 1e-4  # pull towards the start values, where columns have unit length


class Work(NamedTuple):
    """What a micro-batch does, in units of the coefficients it was worked out with; its cost is c0 + the sum."""

    linear: float  # a T + head C
    attention: float  # b Q + window_b Q_w


def check_coefficients(coefficients: Coefficients) -> None:
    """ValueError for a cost that is negative, no number, or nothing at all."""
    values = asdict(coefficients)
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"coefficients.{name} must be finite and at least 0, got {value!r}")
    if not any(values[name] for name in ("a", "b", "head", "window_b")):
        raise ValueError("one of coefficients.a, b, head and window_b must be above 0, or every plan costs the same")


def pairs(length: FloatArray, window: int) -> FloatArray:
    """Twice the query-key pairs of causal attention: L^2, or 2 L w - w^2 beyond a window of w tokens (0 = none)."""
    return np.where((window > 0) & (length > window), 2.0 * length * window - float(window) ** 2, length * length)


def attention_costs(length: FloatArray, coefficients: Coefficients) -> FloatArray:
    return coefficients.b * length * length + coefficients.window_b * pairs(length, coefficients.window)


def alone_costs(lengths: IntArray, coefficients: Coefficients) -> FloatArray:
    """Cost of each sample by itself, c0 apart; `lengths` (n, 2) holds its prompt and completion tokens."""
    prompt, completion = lengths[:, 0].astype(np.float64), lengths[:, 1].astype(np.float64)
    length = prompt + completion
    return coefficients.a * length + coefficients.head * completion + attention_costs(length, coefficients)


def prefix_costs(prompt_tokens: IntArray, coefficients: Coefficients) -> FloatArray:
    """What each further sample behind a prompt saves: the cost of all its tokens but the last."""
    prefix = prompt_tokens.astype(np.float64) - 1.0
    return coefficients.a * prefix + attention_costs(prefix, coefficients)


def fragment_work(prompt_tokens: int, completions: Sequence[int], coefficients: Coefficients) -> Work:
    """Work of samples laid out behind their shared prompt, or of one sample alone."""
    prefix, completion = float(prompt_tokens - 1), np.asarray(completions, dtype=np.float64)
    tokens = prefix + float((completion + 1.0).sum())
    behind = attention_costs(prefix + 1.0 + completion, coefficients)
    before = float(attention_costs(np.array(prefix), coefficients))
    return Work(
        linear=coefficients.a * tokens + coefficients.head * float(completion.sum()),
        attention=float(behind.sum()) - (len(completion) - 1) * before,
    )


def bin_work(
    fragments: Sequence[Sequence[int]], lengths: Sequence[tuple[int, int]], coefficients: Coefficients
) -> Work:
    """Work of a bin: fragments of sample indices, and the prompt and completion tokens of every sample."""
    works = [fragment_work(lengths[own[0]][0], [lengths[i][1] for i in own], coefficients) for own in fragments]
    return Work(sum(work.linear for work in works), sum(work.attention for work in works))


def fragment_cost(prompt_tokens: int, completions: Sequence[int], coefficients: Coefficients) -> float:
    return sum(fragment_work(prompt_tokens, completions, coefficients))


def full_cost(coefficients: Coefficients, cap: int) -> float:
    """Cost of one sample of `cap` tokens, all but its first generated; c0 apart."""
    return float(alone_costs(np.array([[0, cap]]), coefficients)[0])


def with_overhead(coefficients: Coefficients, cap: int, share: float = 0.03) -> Coefficients:
    """The same with c0 = `share` of a full micro-batch: a start value, until times are measured."""
    return replace(coefficients, c0=share * full_cost(coefficients, cap))


def model_coefficients(config: Any) -> Coefficients:
    """FLOP of a forward pass, from a transformers text config: dense, sparse experts, sliding windows.

    Tied and untied heads cost the same, an embedding nothing. ValueError where the config lacks a size.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads  # not always hidden / heads, so asked first
    projections = 4 * hidden * head_dim * (heads + kv_heads)
    full, windowed, window = count_attention_layers(config)
    return Coefficients(
        c0=0.0,
        a=float(size(config, "num_hidden_layers") * projections + 6 * hidden * total_width(config)),
        b=float(2 * heads * head_dim * full),
        head=float(2 * hidden * size(config, "vocab_size")),
        window_b=float(2 * heads * head_dim * windowed),
        window=window,
    )


def size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"the model's config needs a whole {name} of at least 1, got {value!r}")
    return value


def count_attention_layers(config: Any) -> tuple[int, int, int]:
    """Layers with full attention, layers with a sliding window, and that window."""
    num_layers = size(config, "num_hidden_layers")
    window = getattr(config, "sliding_window", None) or 0
    if not getattr(config, "use_sliding_window", True):
        window = 0
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        first = getattr(config, "max_window_layers", None) or 0
        kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * max(num_layers - first, 0)
    windowed = list(kinds).count("sliding_attention") if window else 0
    linear = list(kinds).count("linear_attention")  # costs by the token, which the projections stand for
    return num_layers - linear - windowed, windowed, window if windowed else 0


def total_width(config: Any) -> int:
    """Width of the gated MLPs a token passes, summed over layers; of sparse experts, those it is sent to."""
    num_layers, active = size(config, "num_hidden_layers"), getattr(config, "num_experts_per_tok", None)
    if not active:
        return num_layers * size(config, "intermediate_size")
    expert = getattr(config, "moe_intermediate_size", None) or size(config, "intermediate_size")
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    shared += (getattr(config, "n_shared_experts", None) or 0) * expert
    every = getattr(config, "decoder_sparse_step", None) or 1
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    dense |= set(range(getattr(config, "first_k_dense_replace", None) or 0))
    dense |= {i for i in range(num_layers) if (i + 1) % every}
    num_dense = len(dense & set(range(num_layers)))
    width = (num_layers - num_dense) * (active * expert + shared)
    return width + (num_dense * size(config, "intermediate_size") if num_dense else 0)


class Observation(NamedTuple):
    """A micro-batch that was timed: of a slot, its costliest."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: Coefficients  # in seconds
    r2: float  # of the full fit, also where it was not taken
    num_observations: int
    condition: float  # of the features, columns of unit length
    rescaled_only: bool  # one common factor on the start values, as the times could not carry more
    factors: tuple[float, float, float]  # seconds a micro-batch, a unit of linear and a unit of attention work

    def seconds(self, work: Work) -> float:
        """Predicted for a micro-batch, its work in the units that the observations had."""
        return self.factors[0] + self.factors[1] * work.linear + self.factors[2] * work.attention


def refit(observations: Sequence[Observation], start: Coefficients) -> Fit:
    """Coefficients in seconds from measured times: non-negative least squares, pulled towards `start`.

    `start` may be in any unit; each observation's work must be in that unit. A good plan makes all micro-batches alike,
    and then times say nothing of where they come from: such fits only rescale `start`. ValueError for no observations
    or for times and work that are not positive.
    """
    features = np.array([(1.0, o.work.linear, o.work.attention) for o in observations]).reshape(-1, 3)
    seconds = np.array([o.seconds for o in observations], dtype=np.float64)
    if not len(seconds) or not np.isfinite(features).all() or not np.isfinite(seconds).all() or seconds.min() <= 0:
        raise ValueError("a fit needs at least one observation, and finite times above 0")
    prior = np.array([start.c0, 1.0, 1.0])
    predicted = features @ prior
    if predicted.min() <= 0:
        raise ValueError("a fit needs micro-batches with work in them")
    factor = float(seconds @ predicted / (predicted @ predicted))
    free, r2, condition = fit_apart(features, seconds, factor * prior)
    rescaled_only = not (r2 >= MIN_R2 and condition <= MAX_CONDITION)
    c0, linear, attention = (factor * prior if rescaled_only else free).tolist()
    fitted = replace(
        start,
        c0=c0,
        a=linear * start.a,
        head=linear * start.head,
        b=attention * start.b,
        window_b=attention * start.window_b,
    )
    return Fit(fitted, r2, len(seconds), condition, rescaled_only, (c0, linear, attention))


def fit_apart(features: FloatArray, seconds: FloatArray, prior: FloatArray) -> tuple[FloatArray, float, float]:
    """Each coefficient by itself, the fit's R^2 and the condition of the features.

    With three unknowns, every choice of those that are zero is tried: exact, and simpler than an active-set method.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    columns, ridge = features / scale, math.sqrt(RIDGE)
    norm = float(np.linalg.norm(seconds))
    matrix = np.vstack([columns, ridge * np.eye(3)])
    wanted = np.concatenate([seconds / norm, ridge * prior * scale / norm])
    best, least = np.zeros(3), math.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (3, 2, 1)):
        trial = np.zeros(3)
        trial[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        loss = float(np.sum((matrix @ trial - wanted) ** 2))
        if trial.min() >= 0 and loss < least:
            best, least = trial, loss
    residual = float(np.sum((columns @ best * norm - seconds) ** 2))
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    r2 = 1.0 - residual / spread if spread > 0 else 0.0
    condition = float(np.linalg.cond(columns)) if len(seconds) >= 3 else math.inf
    return best * norm / scale, r2, condition
