"""The bench's pictures: what is drawn of its lines, and that a picture is what it says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.bench.curves import Chart, Line, Panel, charts, draw, draw_all, read_lines

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "bench.jsonl"


def figure(kind: str, key: str, value: float) -> Line:
    """One line of a bench."""
    return {"kind": kind, "key": key, "value": value}


def test_hits_are_drawn_as_a_share_of_the_best_possible() -> None:
    """One curve a policy over the budgets, in their order; the best is the level, not a curve."""
    lines = [
        figure("prefix", "trie.lookup_32k_ms", 1.0),
        figure("prefix", "disk.chats.5.ours", 0.9),
        *(
            figure("prefix", f"chats.{percent}.hit_tokens.{policy}", value)
            for percent, policy, value in [
                (40, "ours", 30.0), (40, "clairvoyant", 40.0),
                (5, "ours", 10.0), (5, "clairvoyant", 20.0),
            ]
        ),
    ]  # fmt: skip
    (chart,) = charts(lines)
    (panel,) = chart.panels
    assert panel.curves == {"ours": [(5.0, 0.5), (40.0, 0.75)]}
    assert panel.level == 1.0


def test_rows_are_in_the_order_of_their_numbers() -> None:
    """Not in that of their digits; shapes by size."""
    lines = [
        figure("products", f"products.{shape}.{rows}.ours_gb_s", value)
        for shape in ("40000x2048", "512x512")
        for rows, value in [(16, 3.0), (128, 4.0), (2, 2.0)]
    ]
    (chart,) = charts(lines)
    assert [panel.title for panel in chart.panels] == [
        "weights 512x512, float32",
        "weights 40000x2048, float32",
    ]
    curves = chart.panels[0].curves
    assert curves is not None
    assert curves["mlxd"] == [(2.0, 2.0), (16.0, 3.0), (128.0, 4.0)]


def test_a_later_figure_replaces_an_earlier_one() -> None:
    """The committed lines are of several runs."""
    lines = [figure("server", "server.a.tokens_per_s.ratio", value) for value in (1.0, 2.0)]
    (chart,) = charts(lines)
    assert chart.panels[0].bars == {"tokens/s": 2.0}


def test_the_committed_figures_have_all_charts() -> None:
    """Each kind of line that is drawn is among them."""
    assert [chart.name for chart in charts(read_lines(EVIDENCE))] == [
        "bench-one-stream",
        "bench-products",
        "bench-prefix",
        "bench-server",
    ]


def test_a_picture_says_what_it_shows_and_is_the_same_every_time(tmp_path: Path) -> None:
    """Titles, axes and names stand in it as text; bars have their figures."""
    chart = Chart(
        "two",
        (
            Panel("speeds", "rows", "GB/s", curves={"mlxd": [(1.0, 2.0), (2.0, 3.0)]}, is_log=True),
            Panel("ratios", "mlxd / peer", "", bars={"first token": 0.5}, level=1.0),
        ),
    )
    first = draw(chart, tmp_path).read_bytes()
    assert draw(chart, tmp_path).read_bytes() == first
    texts = {text.strip() for text in ET.fromstring(first).itertext() if text.strip()}
    assert {"speeds", "rows", "GB/s", "mlxd", "ratios", "first token", "0.5"} <= texts


def test_all_charts_go_to_a_folder_that_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is named."""
    folder = tmp_path / "deep" / "pictures"
    draw_all([figure("server", "server.a.tokens_per_s.ratio", 1.5)], folder)
    assert [path.name for path in folder.iterdir()] == ["bench-server.svg"]
    assert str(folder / "bench-server.svg") in capsys.readouterr().err
