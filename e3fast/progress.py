"""What a run shows while it goes and when it ends: a progress bar, and a table of before and after."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from e3fast.metrics import number, pass_names, run_costs, step_seconds, tenth_means


class ProgressBar:
    """A live bar on a terminal; elsewhere a plain line for the first and last step and every `plain_every` seconds."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None, plain_every: float = 5.0) -> None:
        """`total` steps, of which a resumed run has `done` some already."""
        self.total = total
        self.console = console or Console(file=sys.stdout)
        self.plain_every = plain_every
        self.printed_at = -float("inf")
        self.step_seconds: deque[float] = deque(maxlen=20)
        self.live: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None))
            status = TextColumn("{task.description}", markup=False)
            self.live = Progress(*columns, status, console=self.console, expand=True)
            self.task = self.live.add_task("", total=total, completed=done)
            self.live.start()

    def update(self, metrics: dict[str, Any]) -> None:
        """Show a finished step."""
        done = int(metrics["step"]) + 1
        self.step_seconds.append(step_seconds(metrics))
        pace = sum(self.step_seconds) / len(self.step_seconds)
        text = status_text(metrics, seconds_left=pace * (self.total - done))
        if self.live:
            self.live.update(self.task, completed=done, description=text)
        elif done == self.total or time.monotonic() - self.printed_at >= self.plain_every:
            self.printed_at = time.monotonic()
            self.note(f"step {done}/{self.total}  {text}")

    def note(self, text: str) -> None:
        """Print a line of text above the bar."""
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        if self.live:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.console.file, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands; a second call does nothing."""
        if self.live:
            self.live.stop()


def status_text(metrics: dict[str, Any], seconds_left: float) -> str:
    """One step in a line; what was not measured is left out."""
    words = []
    if (rate := number(metrics, "clean_accuracy")) is not None:
        words.append(f"pass {rate:.1%}")
    if (entropy := number(metrics, "entropy")) is not None:
        target = number(metrics, "entropy_target")
        words.append(f"entropy {entropy:.3f}" + (f"/{target:.3f}" if target is not None else ""))
    if (temperature := number(metrics, "temperature")) is not None:
        words.append(f"T {temperature:.2f}")
    if (speed := number(metrics, "tokens_per_second")) is not None:
        words.append(f"{speed:,.0f} tok/s")
    if failed := number(metrics, "verdict/failed"):
        words.append(f"{failed:.0f} failed")
    if metrics.get("stepped") is False:
        words.append("no signal")
    if seconds_left > 0:
        words.append(f"{clock_text(seconds_left)} left")
    return "  ".join(words)


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def summary_table(
    before: dict[str, Any] | None, after: dict[str, Any] | None, metrics: Sequence[dict[str, Any]]
) -> Table:
    """The run on one screen: held-out pass@k before and after, then what it took. Missing figures show as a dash."""
    table = Table(title="Before and after", title_justify="left")
    table.add_column("")
    for heading in ("before", "after", "gain"):
        table.add_column(heading, justify="right")
    add_pass_rates(table, before or {}, after or {})
    add_changes(table, metrics)
    add_costs(table, metrics)
    return table


def add_pass_rates(table: Table, before: dict[str, Any], after: dict[str, Any]) -> None:
    """pass@k over the whole held-out set, then by source where there are several."""
    names = pass_names(before, after)
    for name in names:
        table.add_row(f"held-out {name}", *share_cells(number(before, name), number(after, name)), style="bold")
    old, new = before.get("by_source") or {}, after.get("by_source") or {}
    sources = list(old | new)
    for source in sources if len(sources) > 1 else []:
        for name in names:
            cells = share_cells(number(old.get(source, {}), name), number(new.get(source, {}), name))
            table.add_row(f"  {short(source, sources)} {name}".replace("[", r"\["), *cells)
    table.add_section()


def short(source: str, sources: Sequence[str]) -> str:
    """A source's name without the first word, where all share it."""
    shared = len({name.partition(" ")[0] for name in sources}) == 1 and all(" " in name for name in sources)
    return source.partition(" ")[2] if shared else source


def add_changes(table: Table, metrics: Sequence[dict[str, Any]]) -> None:
    """First tenth of the steps against the last."""
    table.add_row("[dim]training[/dim]", "[dim]first tenth[/dim]", "[dim]last tenth[/dim]", "")
    for label, key in (("clean pass rate", "clean_accuracy"), ("all-wrong groups", "all_wrong_share")):
        table.add_row(label, *share_cells(*tenth_means(metrics, key)))
    first, last = tenth_means(metrics, "entropy")
    _, target = tenth_means(metrics, "entropy_target")
    off = "" if last is None or not target else f"{last / target - 1:+.1%} of target {target:.3f}"
    table.add_row("entropy (nats a token)", figure(first, ".3f"), figure(last, ".3f"), off)
    ends = [number(row, "temperature") for row in (*metrics[:1], *metrics[-1:])] or [None, None]
    table.add_row("temperature, first and final step", figure(ends[0], ".3f"), figure(ends[-1], ".3f"), "")
    table.add_section()


def add_costs(table: Table, metrics: Sequence[dict[str, Any]]) -> None:
    """What the run used, all steps together."""
    costs = run_costs(metrics)
    for label, text in (
        ("steps", f"{len(metrics):,}"),
        ("generated tokens", f"{costs.tokens:,}"),
        ("generated tokens / s", figure(costs.tokens_per_second, ",.0f")),
        ("minutes of training", f"{costs.seconds / 60:.1f}"),
        ("peak memory (GiB)", figure(costs.peak_gib, ".2f")),
        ("failed rollouts", f"{costs.failed:,}"),
    ):
        table.add_row(label, "", text, "")


def share_cells(before: float | None, after: float | None) -> tuple[str, str, str]:
    """Two shares in percent and their difference in percentage points."""
    gain = "-" if before is None or after is None else f"{100 * (after - before):+.1f} points"
    return figure(before, ".1%"), figure(after, ".1%"), gain


def figure(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def evaluation_table(result: dict[str, Any]) -> Table:
    """One evaluation: pass@k over all prompts and by source."""
    names = pass_names(result)
    table = Table(title=f"{result['samples']} completions a prompt at temperature {result['temperature']:g}")
    for heading in ("", "prompts", *names):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = {"all": result, **result["by_source"]} if len(result["by_source"]) > 1 else {"all": result}
    for label, row in rows.items():
        label = short(label, list(result["by_source"])) if label != "all" else label
        table.add_row(label, str(row["num_prompts"]), *(share_cells(row.get(name), None)[0] for name in names))
    return table


def print_table(table: Table) -> None:
    Console(file=sys.stdout).print(table)
