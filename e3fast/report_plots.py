"""The figures of a run report as plotly JSON, of step metrics, evaluations and rollouts. Pure; no plotly needed.

A figure of nothing is None. Plotly reads markup in text: nothing that a model or a data set wrote goes into a figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from e3fast.metrics import mean, number, pass_names
from e3fast.types import VERDICTS, IntArray

# Okabe and Ito's colours, told apart by colour-blind eyes; one meaning each through the whole report.
BLUE, SKY, GREEN, ORANGE, RED, PINK, GREY = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8a929c"
INK, GRID, PALE, PURPLE = "#1f2933", "#e8ecf1", "#a3c8e0", "#6b4fa0"
VERDICT_COLORS = {"correct": GREEN, "truncated": ORANGE, "unparsable": PINK, "wrong": RED, "failed": GREY}
STAGE_COLORS = {"generate": BLUE, "reward": ORANGE, "pack": PINK, "update": GREEN, "sync": SKY, "other": GREY}
DIFFICULTY_COLORS = ("#7f2704", "#d94801", "#fd8d3c", "#6baed6", "#08519c")  # hardest fifth of the prompts first
AXIS = {"gridcolor": GRID, "zeroline": False}
SMALL = {"size": 11}
MOST_BARS = 120

Rows = Sequence[dict[str, Any]]
Series = list[float | None]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with its heading and a sentence that says how to read it."""

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False


def all_plots(metrics: Rows, evals: Rows, rollouts: pa.Table, base_group: int | None, limit: int | None) -> list[Plot]:
    """Every figure there is data for. `base_group` and `limit`: the run's rollouts per prompt and most new tokens."""
    plots = (
        pass_rate(metrics, evals),
        entropy(metrics),
        temperature(metrics),
        *budget(rollouts, base_group),
        zero_signal(metrics),
        verdicts(metrics),
        completion_length(metrics, limit),
        stage_times(metrics),
        one_line(metrics, "tokens_per_second", "Speed", "Generated tokens over the step's whole time.", "tokens / s"),
        one_line(metrics, "grad_norm", "Gradient norm", "Global norm before clipping.", "gradient norm"),
    )
    return [plot for plot in plots if plot]


def pass_rate(metrics: Rows, evals: Rows) -> Plot | None:
    rates = column(metrics, "clean_accuracy")
    tokens = {"customdata": column(metrics, "total_generated_tokens")}
    data = [
        line("each step", steps(metrics), rates, PALE, width=1),
        line("smoothed", steps(metrics), smooth(rates), BLUE, width=3)
        | tokens
        | {"hovertemplate": "%{y:.1%} after %{customdata:,.0f} tokens"},
    ]
    for name, color in zip(pass_names(*evals), (INK, PURPLE, PINK, SKY), strict=False):
        points = line(f"held-out {name}", steps(evals), column(evals, name), color, width=1.5, dash="dot")
        data.append(points | {"mode": "lines+markers", "marker": {"size": 10, "symbol": "diamond", "color": color}})
    caption = "Share correct among a prompt's first rollouts, mean over the step's prompts. Diamonds: held-out."
    return plot("Pass rate", caption, data, "share correct", tickformat=".0%", rangemode="tozero", wide=True)


def entropy(metrics: Rows) -> Plot | None:
    x, target = steps(metrics), column(metrics, "entropy_target")
    data = [line("entropy", x, column(metrics, "entropy"), BLUE)]
    if any(value is not None for value in target):
        edges = [[None if t is None else t * factor for t in target] for factor in (0.97, 1.03)]
        band = {"fill": "tonexty", "fillcolor": "rgba(230,159,0,0.16)"}
        low, high = (line("target ± 3 %", x, edge, "rgba(0,0,0,0)", width=0) | {"hoverinfo": "skip"} for edge in edges)
        data = [low | {"showlegend": False}, high | band, line("target", x, target, ORANGE, dash="dash"), *data]
    probes = column(metrics, "entropy_at_one")
    if any(value is not None for value in probes):
        marker = {"mode": "markers", "marker": {"size": 8, "color": PURPLE}, "connectgaps": False}
        data.append(line("at temperature 1, one micro-batch", x, probes, PURPLE) | marker)
    return plot("Entropy", "Of the policy that sampled, at its temperature.", data, "nats / token")


def temperature(metrics: Rows) -> Plot | None:
    values = column(metrics, "temperature")
    known = [value for value in values if value is not None]
    middle, reach = (max(known) + min(known)) / 2 if known else 1.0, (max(known) - min(known)) * 0.6 if known else 0.0
    span = [middle - max(reach, 0.05), middle + max(reach, 0.05)]  # a constant is drawn as one, not as its rounding
    data = [line("temperature", steps(metrics), values, PURPLE)]
    return plot("Temperature", "Mean over the step's rollouts.", data, "sampling temperature", range=span)


def zero_signal(metrics: Rows) -> Plot | None:
    stacks = {"all wrong": ("all_wrong_share", RED), "all correct": ("all_correct_share", GREEN)}
    data = [bars(name, metrics, column(metrics, key), color) for name, (key, color) in stacks.items()]
    caption = "Groups whose rollouts all got the same verdict teach nothing."
    return plot("Groups without signal", caption, data, "share of groups", tickformat=".0%", range=[0, 1])


def verdicts(metrics: Rows) -> Plot | None:
    data = []
    for verdict in VERDICTS:
        counts, totals = column(metrics, f"verdict/{verdict}"), column(metrics, "rollouts")
        shares = [c / t if c is not None and t else None for c, t in zip(counts, totals, strict=True)]
        data.append(bars(verdict, metrics, shares, VERDICT_COLORS[verdict]))
    caption = "The five verdicts, never merged."
    return plot("Verdicts", caption, data, "share of rollouts", tickformat=".0%", range=[0, 1])


def completion_length(metrics: Rows, limit: int | None) -> Plot | None:
    x = steps(metrics)
    data = [line("mean length", x, column(metrics, "mean_completion_tokens"), BLUE)]
    if limit and x:
        data.append(line("limit", x, [limit] * len(x), GREY, dash="dash", width=1))
    return plot("Completion length", "Mean over the step's rollouts.", data, "tokens", rangemode="tozero")


def stage_times(metrics: Rows) -> Plot | None:
    found = {key.removeprefix("seconds/"): None for row in metrics for key in row if key.startswith("seconds/")}
    names = sorted(found, key=lambda name: [*STAGE_COLORS, name].index(name))
    data = []
    for i, name in enumerate(names):
        color = STAGE_COLORS.get(name, DIFFICULTY_COLORS[i % 5])
        data.append(bars(name, metrics, column(metrics, f"seconds/{name}"), color))
    return plot("Time by stage", "Where a step's seconds go.", data, "seconds / step")


def one_line(metrics: Rows, key: str, title: str, caption: str, unit: str) -> Plot | None:
    return plot(title, caption, [line(title, steps(metrics), column(metrics, key), BLUE)], unit, rangemode="tozero")


def budget(rollouts: pa.Table, base_group: int | None) -> list[Plot]:
    """Rollouts a visit by the prompt's difficulty: over the whole run, and as the run goes on."""
    step, fifth, size, labels = visits_by_difficulty(rollouts)
    if not len(step):
        return []
    x = [labels[i] for i in range(5) if labels[i]]
    y = [float(size[fifth == i].mean()) for i in range(5) if labels[i]]
    colors = [DIFFICULTY_COLORS[i] for i in range(5) if labels[i]]
    overall = {"type": "bar", "x": x, "y": y, "marker": {"color": colors}, "hovertemplate": "%{y:.2f}<extra></extra>"}
    if base_group:
        base = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": base_group, "y1": base_group}
        note = {"text": "configured", "textposition": "end", "font": {"color": GREY}}
        shapes = [base | {"line": {"color": GREY, "dash": "dash", "width": 1.5}, "label": note}]
    else:
        shapes = []
    caption = "Mean rollouts per visit, by fifths of the prompts in order of their pass rate in this run."
    axis = {"title": {"text": "pass rate of the prompts"}, "showgrid": False, "tickangle": 0}
    first = plot("Budget by difficulty", caption, [overall], "rollouts / prompt", xaxis=axis, shapes=shapes)
    lines = [budget_line(step[fifth == i], size[fifth == i], i, step) for i in range(5) if labels[i]]
    second = plot("Budget over the run", "The same fifths, step by step.", lines, "rollouts / prompt")
    return [p for p in (first, second) if p]


def budget_line(at: IntArray, size: IntArray, fifth: int, all_steps: IntArray) -> dict[str, Any]:
    """Mean group size of one fifth of the prompts, in at most 20 stretches of the run."""
    low, high = int(all_steps.min()), int(all_steps.max())
    width = math.ceil((high - low + 1) / 20)
    bins = (at - low) // width
    x = [low + (b + 0.5) * width - 0.5 for b in np.unique(bins)]
    y = [float(size[bins == b].mean()) for b in np.unique(bins)]
    name = ("hardest", "2nd", "middle", "4th", "easiest")[fifth]
    return line(name, x, y, DIFFICULTY_COLORS[fifth]) | {"mode": "lines+markers"}


def visits_by_difficulty(rollouts: pa.Table) -> tuple[IntArray, IntArray, IntArray, list[str]]:
    """Step, prompt's fifth (0 hardest) and group size of each visit (step, prompt); and the fifths' labels.

    First requests only; a prompt that was never judged is left out. Fifths hold equally many prompts: of equal pass
    rates, the prompt met first is the harder.
    """
    first = np.asarray(rollouts["kind"].to_pylist(), dtype=object) == "first"
    verdict = np.asarray(rollouts["verdict"].to_pylist(), dtype=object)[first]
    prompt = rollouts["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()[first]
    num_prompts = int(prompt.max(initial=0)) + 1
    judged = np.bincount(prompt, verdict != "failed", num_prompts)
    rates = np.bincount(prompt, verdict == "correct", num_prompts) / np.maximum(judged, 1)
    known = np.flatnonzero(judged)
    order = known[np.argsort(rates[known], kind="stable")]
    fifths = np.full(num_prompts, -1)
    fifths[order] = np.arange(len(order)) * 5 // max(len(order), 1)
    visits, sizes = np.unique(rollouts["step"].to_numpy()[first] * num_prompts + prompt, return_counts=True)
    step, visited = np.divmod(visits, num_prompts)
    kept = fifths[visited] >= 0
    return step[kept], fifths[visited][kept], sizes[kept], [range_label(rates[fifths == i].tolist()) for i in range(5)]


def range_label(rates: list[float]) -> str:
    ends = [f"{100 * rate:.0f}" for rate in (min(rates), max(rates))] if rates else []
    return "-".join(dict.fromkeys(ends)) + "%" if ends else ""


def steps(rows: Rows) -> list[float]:
    return [row["step"] for row in rows]


def column(rows: Rows, key: str) -> Series:
    return [number(row, key) for row in rows]


def smooth(values: Series) -> Series:
    """Centred moving mean over about a tenth of the run; missing values are skipped."""
    reach = max(1, len(values) // 20)
    windows = ([v for v in values[max(0, i - reach) : i + reach + 1] if v is not None] for i in range(len(values)))
    return [mean(window) if window else None for window in windows]


def line(name: str, x: Sequence[float], y: Sequence[float | None], color: str, **style: Any) -> dict[str, Any]:
    mode = "lines" if len(x) > 2 else "lines+markers"
    trace = {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y)}
    return trace | {"line": {"color": color, **style}}


def bars(name: str, rows: Rows, values: Series, color: str) -> dict[str, Any]:
    """Stacked bars; in a long run one bar is the mean of some neighbouring steps."""
    size = max(1, math.ceil(len(values) / MOST_BARS))
    x = [mean(steps(rows[i : i + size])) for i in range(0, len(values), size)]
    chunks = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    y = [mean(chunk) if chunk else None for chunk in chunks]
    marker = {"color": color, "line": {"width": 0}}
    return {"type": "bar", "name": name, "x": x, "y": y, "width": size, "marker": marker}


def plot(
    title: str, caption: str, data: list[dict[str, Any]], unit: str, wide: bool = False, **axes: Any
) -> Plot | None:
    """A figure in the report's look; keyword arguments are of the y axis, but for `xaxis` and `shapes`."""
    if not any(value is not None for trace in data for value in trace["y"]):
        return None
    layout = {
        "xaxis": axes.pop("xaxis", {"title": {"text": "step"}, **AXIS}),
        "shapes": axes.pop("shapes", []),
        "yaxis": {"title": {"text": unit, "standoff": 10}, **AXIS, "automargin": True, "ticklabelstandoff": 6, **axes},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": INK},
        "margin": {"l": 60, "r": 12, "t": 30, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal", "font": SMALL},
        "showlegend": len(data) > 1,
        "hovermode": "x unified",
        "barmode": "stack",
        "bargap": 0.25,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    return Plot(title, caption, data, layout, wide)
