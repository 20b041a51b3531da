"""report.html of a run: one self-contained page, readable offline, of what its directory holds.

What a model or a data set wrote is untrusted: it is escaped wherever it stands, and the page may load nothing.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e3fast.report_parts import cards, details, header, plot_boxes, problem_list, samples, sources, text, whole
from e3fast.report_plots import Plot, all_plots
from e3fast.runlog import read_evals, read_metrics, read_rollouts, replace_file

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
DRAW = """
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent)))
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false, displayModeBar: false});
"""


def write_report(run_dir: Path | str) -> Path:
    """Write report.html into the run directory; what could not be read is listed on the page.

    ValueError names the directory if it is not a run (it has no metrics.jsonl).
    """
    path = Path(run_dir)
    if not (path / "metrics.jsonl").is_file():
        raise ValueError(f"{path} is not a run directory: it has no metrics.jsonl")
    page = make_page(path).encode(errors="replace")
    replace_file(path / "report.html", lambda temporary: temporary.write_bytes(page))
    return path / "report.html"


def make_page(path: Path) -> str:
    problems: list[str] = []
    metrics, evals = read_metrics(path, problems), read_evals(path, problems)
    config = read_table(path / "config.toml", tomllib.loads, problems)
    versions = read_table(path / "versions.json", json.loads, problems)
    visits = read_rollouts(path, ["step", "prompt_id", "verdict", "kind"], problems=problems)
    kept = sorted(set(visits["step"].to_pylist()))
    shown = [read_rollouts(path, steps=[step]) for step in dict.fromkeys([*kept[:1], *kept[-1:]])]
    problems += [] if metrics else ["metrics.jsonl: no step"]
    problems += [] if evals else ["eval.jsonl: no evaluation"]
    problems += [] if visits.num_rows else ["rollouts: none"]
    rollout = config.get("rollout") or {}
    plots = all_plots(metrics, evals, visits, whole(rollout, "rollouts_per_prompt"), whole(rollout, "max_new_tokens"))
    footer = "Written by e3fast. Rollouts that failed count in no pass rate; a first or last tenth is of the steps."
    body = [
        header(path, metrics, config, versions),
        '<main class="page">',
        cards(metrics, evals),
        problem_list(problems),
        plot_boxes(plots),
        sources(evals),
        samples(shown),
        details("Configuration", config and (path / "config.toml").read_text(errors="replace")),
        details("Versions and machine", versions and json.dumps(versions, indent=2)),
        f"<footer>{footer}</footer></main>",
    ]
    return html_page(path, "\n".join(body), plots)


def html_page(path: Path, body: str, plots: Sequence[Plot]) -> str:
    from plotly.offline import get_plotlyjs  # an import of a second, paid only by who writes a report

    style = Path(__file__).with_name("report.css").read_text()
    figures = {f"plot{i}": {"data": plot.data, "layout": plot.layout} for i, plot in enumerate(plots)}
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(path.resolve().name)} - e3fast</title><style>{style}</style></head><body>",
            body,
            f'<script type="application/json" id="figures">{script_json(figures)}</script>',
            f"<script>{get_plotlyjs()}</script><script>{DRAW}</script></body></html>\n",
        ]
    )


def script_json(value: Any) -> str:
    """JSON that cannot end the script block it stands in."""
    return json.dumps(value, allow_nan=False).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def read_table(path: Path, parse: Any, problems: list[str]) -> dict[str, Any]:
    """A TOML or JSON file as a dict; empty if it is not there or, with a problem noted, not readable."""
    try:
        table = parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return {}
    return table if isinstance(table, dict) else {}
