"""`python -m tests.bench.curves LINES FOLDER`: draw a bench's JSON lines, one SVG for each chart.

`charts` is pure: it turns lines into panels of curves or bars. `draw` has matplotlib draw them.
Lines of other kinds, and charts that have no line, are left out; where a figure stands more than
once in the lines, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Line: TypeAlias = Mapping[str, Any]
Curves: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]

INCHES_A_PANEL, INCHES_HIGH = 4.6, 3.4
STYLE = {"svg.hashsalt": "mlxd", "svg.fonttype": "none", "font.size": 9.0}
"""Two runs draw the same bytes of the same lines, and text stays text."""
SERVED = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_s": "first token, p50",
    "ttft_p99_s": "first token, p99",
    "itl_p99_s": "between tokens, p99",
}
"""The figures of a server's case that are drawn, and what they are called."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one axis (`is_log`: in powers of two), or bars, where `bars` has any."""

    title: str
    x: str
    y: str
    curves: Curves | None = None
    bars: Mapping[str, float] | None = None
    is_log: bool = False
    level: float | None = None
    """Where a dotted line is drawn: what the figures are compared with."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture: panels side by side. `name` is its file's, without `.svg`."""

    name: str
    panels: tuple[Panel, ...]


def charts(lines: Iterable[Line]) -> list[Chart]:
    """Return the charts that these lines have figures for, in a fixed order."""
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    drawn = (Chart(name, make(by_kind.get(kind, []))) for name, kind, make in CHARTS)
    return [chart for chart in drawn if chart.panels]


def draw_all(lines: Iterable[Line], folder: Path) -> None:
    """Draw every chart of these lines into `folder`, which is made; say which files there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts(lines):
        sys.stderr.write(f"{draw(chart, folder)}\n")


def draw(chart: Chart, folder: Path) -> Path:
    """Write a chart as `folder`/NAME.svg and return the file's path."""
    with rc_context(STYLE):  # type: ignore[arg-type] # names are literals to it
        width = INCHES_A_PANEL * len(chart.panels)
        figure = Figure(figsize=(width, INCHES_HIGH), layout="constrained")
        axes = figure.subplots(1, len(chart.panels), squeeze=False)
        for place, panel in zip(axes[0], chart.panels, strict=True):
            _draw_panel(place, panel)
        path = folder / f"{chart.name}.svg"
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _draw_panel(place: Axes, panel: Panel) -> None:
    place.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if panel.level is not None:
        upright = panel.bars is not None
        (place.axvline if upright else place.axhline)(panel.level, color="grey", linestyle=":")
    if panel.bars is not None:
        names = list(panel.bars)[::-1]
        drawn = place.barh(names, [panel.bars[name] for name in names])
        place.bar_label(drawn, fmt="%.3g", padding=3)
        place.margins(x=0.15)
        return
    for name, points in (panel.curves or {}).items():
        place.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    if panel.is_log:
        place.set_xscale("log", base=2)
        place.xaxis.set_major_formatter("{x:.0f}")
    if panel.level is None:
        place.set_ylim(bottom=0)
    place.grid(visible=True, alpha=0.3)
    place.legend()


def _values(lines: Iterable[Line]) -> dict[tuple[str, ...], float]:
    """Return each figure by the parts of its key."""
    return {tuple(line["key"].split(".")): line["value"] for line in lines}


def _list_ways(lines: Sequence[Line]) -> tuple[Panel, ...]:
    """One stream's tokens a second, by every way to the same model."""
    by_model: dict[str, dict[str, float]] = {}
    for line in lines:
        by_model.setdefault(line["model"], {})[line["way"]] = line["decode_tokens_per_s"]
    return tuple(
        Panel(f"one stream, {model}", "tokens/s", "", bars=ways) for model, ways in by_model.items()
    )


def _collect_products(lines: Sequence[Line]) -> tuple[Panel, ...]:
    """How fast weights are read in products of few rows, by shape."""
    names = {"ours_gb_s": "mlxd", "openblas_gb_s": "OpenBLAS", "sgemv_gb_s": "sgemv"}
    shapes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (_, shape, rows, what), value in sorted(
        _values(lines).items(), key=lambda each: (each[0][1], int(each[0][2]))
    ):
        if what in names:
            curves = shapes.setdefault(shape, {name: [] for name in names.values()})
            curves[names[what]].append((float(rows), value))
    return tuple(
        Panel(f"weights {shape}, float32", "rows", "GB/s of weights", curves=curves, is_log=True)
        for shape, curves in sorted(shapes.items(), key=lambda each: _values_of(each[0]))
    )


def _values_of(shape: str) -> int:
    """Return how many values a shape such as 512x512 has."""
    columns, inner = shape.split("x")
    return int(columns) * int(inner)


def _share_hits(lines: Sequence[Line]) -> tuple[Panel, ...]:
    """Tokens that the prefix cache finds, of what one that knows the future would, by its size."""
    hits: dict[tuple[str, int, str], float] = {}
    for key, value in _values(lines).items():
        match key:
            case (name, percent, "hit_tokens", policy):
                hits[name, int(percent), policy] = value
            case _:
                pass
    inputs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (name, budget, policy), value in sorted(hits.items()):
        best = hits[name, budget, "clairvoyant"]
        if policy != "clairvoyant":
            points = inputs.setdefault(name, {}).setdefault(policy, [])
            points.append((float(budget), value / best))
    return tuple(
        Panel(f"prefix cache, {name}", "budget, % of blocks", "of the best possible",
              curves=curves, level=1.0)
        for name, curves in inputs.items()
    )  # fmt: skip


def _compare_servers(lines: Sequence[Line]) -> tuple[Panel, ...]:
    """A server's figures beside mlx-lm's, by case."""
    cases: dict[str, dict[str, float]] = {}
    for key, value in _values(lines).items():
        match key:
            case (_, case, what, "ratio") if what in SERVED:
                cases.setdefault(case, {})[SERVED[what]] = value
            case _:
                pass
    return tuple(
        Panel(f"server, case ({case})", "mlxd / mlx-lm", "", bars=figures, level=1.0)
        for case, figures in sorted(cases.items())
    )


CHARTS: tuple[tuple[str, str, Callable[[Sequence[Line]], tuple[Panel, ...]]], ...] = (
    ("bench-one-stream", "way", _list_ways),
    ("bench-products", "products", _collect_products),
    ("bench-prefix", "prefix", _share_hits),
    ("bench-server", "server", _compare_servers),
)
"""File, kind of line, and what makes its panels."""


def read_lines(path: Path) -> list[Line]:
    """Return a file's lines.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON.
    """
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Draw a file's charts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    draw_all(read_lines(args.lines), args.folder)


if __name__ == "__main__":
    main()
