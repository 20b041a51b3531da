"""The parts of a report's page as HTML: header, cards, tables, sample rollouts. Pure.

Every text from a file of the run goes through `text`, which escapes it.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from e3fast.metrics import number, pass_names, run_costs, tenth_means
from e3fast.progress import clock_text, figure
from e3fast.report_plots import VERDICT_COLORS, Plot, Rows

SAMPLES_A_STEP = 12
MOST_CHARACTERS = 4000  # shown of one completion


def text(value: object) -> str:
    """Any value as HTML text; control characters that browsers would drop or obey become a visible mark."""
    return html.escape("".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def whole(table: Any, key: str) -> int | None:
    value = table.get(key) if isinstance(table, dict) else None
    return value if type(value) is int else None


def header(path: Path, metrics: Rows, config: dict[str, Any], versions: dict[str, Any]) -> str:
    sections = {name: table for name, table in config.items() if isinstance(table, dict)}
    methods = [m.get("name", "?") for m in config.get("methods") or [] if isinstance(m, dict)]
    train, rollout = sections.get("train", {}), sections.get("rollout", {})
    per_step = [str(n) for n in (whole(train, "prompts_per_step"), whole(rollout, "rollouts_per_prompt")) if n]
    facts = {
        "model": sections.get("model", {}).get("name"),
        "methods": ", ".join(map(str, methods)) or ("none: plain GRPO" if config else None),
        "advantage": train.get("advantage"),
        "prompts x rollouts": " x ".join(per_step),
        "learning rate": train.get("learning_rate"),
        "steps": f"{len(metrics)} of {train['steps']}" if "steps" in train else len(metrics),
        "seed": config.get("seed"),
        "machine": versions.get("machine"),
        "e3fast": versions.get("e3fast"),
        "torch": versions.get("torch"),
    }
    spans = [f'<span class="fact"><b>{name}</b>{text(v)}</span>' for name, v in facts.items() if v not in (None, "")]
    name = text(path.resolve().name)
    return f'<header><div class="page"><h1>{name}</h1><div class="facts">{"".join(spans)}</div></div></header>'


def cards(metrics: Rows, evals: Rows) -> str:
    costs, names = run_costs(metrics), pass_names(*evals)
    boxes = [eval_card(name, evals) for name in dict.fromkeys(names[:1] + names[-1:])]
    rates, wrong = tenth_means(metrics, "clean_accuracy"), tenth_means(metrics, "all_wrong_share")
    boxes += [change_card("Pass rate in training", rates, True), change_card("All-wrong groups", wrong, False)]
    entropy, target = tenth_means(metrics, "entropy")[1], tenth_means(metrics, "entropy_target")[1]
    off = f"{entropy / target - 1:+.1%} of the target {target:.3f}" if entropy is not None and target else "no target"
    boxes.append(card("Entropy, last tenth", figure(entropy, ".3f") + " <i>nats</i>", off))
    length = figure(tenth_means(metrics, "mean_completion_tokens")[1], ".0f")
    boxes.append(card("Generated tokens", f"{costs.tokens:,}", f"{length} a completion in the last tenth"))
    boxes.append(card("Speed", figure(costs.tokens_per_second, ",.0f") + " <i>tokens / s</i>", "whole steps"))
    memory = f"peak memory {figure(costs.peak_gib, '.2f')} GiB"
    boxes.append(card("Time in training", clock_text(costs.seconds), memory))
    return f'<div class="cards">{"".join(boxes)}</div>'


def eval_card(name: str, evals: Rows) -> str:
    before, after = number(evals[0], name), number(evals[-1], name)
    if len(evals) > 1:
        return change_card(f"Held-out {name}", (before, after), True, "first to last evaluation")
    return card(f"Held-out {name}", figure(after, ".1%"), f"after {evals[0]['step']} steps; no other evaluation")


def card(label: str, value: str, under: str, tone: str = "") -> str:
    return (
        f'<div class="box card"><div class="label">{label}</div><div class="value">{value}</div>'
        f'<div class="under {tone}">{under}</div></div>'
    )


def change_card(
    label: str, ends: tuple[float | None, float | None], up_is_good: bool, span: str = "first to last tenth"
) -> str:
    before, after = ends
    value = f"{figure(before, '.1%')} <i>→</i> {figure(after, '.1%')}"
    if before is None or after is None:
        return card(label, value, "not measured")
    tone = "" if before == after else "good" if (after > before) == up_is_good else "bad"
    return card(label, value, f"{100 * (after - before):+.1f} points, {span}", tone)


def problem_list(problems: Sequence[str]) -> str:
    items = "".join(f"<li>{text(problem)}</li>" for problem in problems)
    return f'<div class="box problems"><b>Not on this page</b><ul>{items}</ul></div>' if items else ""


def plot_boxes(plots: Sequence[Plot]) -> str:
    boxes = [
        f'<div class="box plot{" wide" if plot.wide else ""}"><h3>{text(plot.title)}</h3><p>{text(plot.caption)}</p>'
        f'<div class="figure" id="plot{i}"></div></div>'
        for i, plot in enumerate(plots)
    ]
    return f'<h2>The run</h2><div class="plots">{"".join(boxes)}</div>' if boxes else ""


def sources(evals: Rows) -> str:
    """Held-out pass@k by source, first evaluation against last."""
    old, new = (row.get("by_source") or {} for row in (evals[0], evals[-1])) if evals else ({}, {})
    rows = []
    for source in sorted(old | new):
        before, after = old.get(source, {}), new.get(source, {})
        for name in pass_names(before, after):
            one, two = number(before, name), number(after, name)
            gain = None if one is None or two is None else 100 * (two - one)
            figures = (figure(one, ".1%"), figure(two, ".1%"), figure(gain, "+.1f"))
            cells = "".join(f'<td class="n">{cell}</td>' for cell in figures)
            count = text(after.get("num_prompts", before.get("num_prompts", "")))
            rows.append(f'<tr><td>{text(source)}</td><td class="n">{count}</td><td>{name}</td>{cells}</tr>')
    if not rows:
        return ""
    heads = '<th>source</th><th class="n">prompts</th><th>measure</th><th class="n">before</th><th class="n">after</th>'
    table = f'<table><tr>{heads}<th class="n">gain, points</th></tr>{"".join(rows)}</table>'
    return f'<h2>Held-out by source</h2><div class="box scroll">{table}</div>'


def pick_samples(table: pa.Table) -> list[dict[str, Any]]:
    """A few rollouts of a step: the verdicts in turn, a rare one too, and each from a group not yet shown if it can."""
    rows, picked = table.to_pylist(), []
    used: Counter[str | int] = Counter()
    while rows and len(picked) < SAMPLES_A_STEP:
        row = min(rows, key=lambda row: (used[row["verdict"]], used[row["group"]]))
        rows.remove(row)
        used.update((row["verdict"], row["group"]))
        picked.append(row)
    return picked


def samples(tables: Sequence[pa.Table]) -> str:
    rows = [sample_row(row) for table in tables for row in pick_samples(table)]
    if not rows:
        return ""
    names = ("step", "verdict", "prompt", "answer", "completion", "reward", "tokens", "temperature")
    heads = "".join(f"<th{' class=n' if name in names[5:] else ''}>{name}</th>" for name in names)
    note = '<p class="soft">Of the first and the last step kept, the verdicts in turn: not their frequencies.</p>'
    table = f'<table class="samples"><tr>{heads}</tr>{"".join(rows)}</table>'
    return f'<h2>Sample rollouts</h2>{note}<div class="box scroll">{table}</div>'


def sample_row(row: dict[str, Any]) -> str:
    color = VERDICT_COLORS.get(row["verdict"], "#444")
    pill = f'<span class="pill" style="background:{color}">{text(row["verdict"])}</span>'
    words = [text(clip(row[key])) for key in ("prompt", "answer", "completion")]
    texts = "".join(f'<td><div class="text code">{word}</div></td>' for word in words)
    figures = (figure(row["reward"], ".2f"), row["num_tokens"], figure(row["temperature"], ".2f"))
    numbers = "".join(f'<td class="n">{value}</td>' for value in figures)
    return f'<tr><td class="n">{row["step"]}</td><td>{pill}</td>{texts}{numbers}</tr>'


def clip(words: str | None) -> str:
    words = words or ""
    rest = len(words) - MOST_CHARACTERS
    return words if rest <= 0 else f"{words[:MOST_CHARACTERS]} … {rest:,} more characters"


def details(title: str, content: str | dict[str, Any]) -> str:
    return f'<details class="box"><summary>{title}</summary><pre>{text(content)}</pre></details>' if content else ""
