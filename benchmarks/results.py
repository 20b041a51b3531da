"""One format for results: benchmarks/results/<name>.csv, long and append-only (ARCHITECTURE.md section 9)."""

from __future__ import annotations

import csv
import datetime
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from e3fast.machine import describe

FOLDER = Path(__file__).parent / "results"
FIELDS = ("date", "sha", "machine", "case", "provider", "metric", "median", "min", "max", "runs", "unit")


@dataclass(frozen=True)
class Row:
    case: str
    provider: str
    metric: str
    values: Sequence[float]
    unit: str


def commit() -> str:
    """The commit measured; "+" behind it where files differ from it."""
    if shutil.which("git") is None:  # a copy of the tree on a bare machine
        return "unknown"
    git = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True, cwd=FOLDER).stdout.strip()  # noqa: E731
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"{title} on {describe()}", title_justify="left")
    for heading in ("case", "provider", "metric", "median", "min", "max", "runs", "unit"):
        table.add_column(heading, justify="left" if heading in ("case", "provider", "metric", "unit") else "right")
    for row in rows:
        figures = (f"{x:.4g}" for x in (statistics.median(row.values), min(row.values), max(row.values)))
        table.add_row(row.case, row.provider, row.metric, *figures, str(len(row.values)), row.unit)
    Console(width=140).print(table)


def save(name: str, rows: Sequence[Row], folder: Path = FOLDER) -> None:
    """Append the rows, with date, commit and machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for row in rows:
            figures = (f"{x:.6g}" for x in (statistics.median(row.values), min(row.values), max(row.values)))
            today = datetime.date.today().isoformat()
            writer.writerow(
                [today, commit(), describe(), row.case, row.provider, row.metric, *figures, len(row.values), row.unit]
            )
