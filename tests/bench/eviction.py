"""Which models stay and who is served next: real arrivals on a simulated clock, 15 cells.

In arrival order the policies differ only in whom they evict; collated, one load serves all who
wait for the model. Nothing is timed: equal inputs give equal figures on any machine.
`python -m tests.bench.eviction` prints the lines and the tables alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.eviction_bound import least_load
from tests.bench.eviction_cells import ALPHAS, SEEDS, Cell, make_cell, read_arrivals
from tests.bench.eviction_collated import FAIRNESS_BOUND_S, replay_collated
from tests.bench.eviction_policies import POLICIES
from tests.bench.eviction_replay import Outcome, in_order
from tests.bench.mooncake import TRACE
from tests.bench.report import json_line
from tests.real_inputs import real_input

CLASSIC = ("lru", "lfu", "gdsf")
SLOW = ("lru", "lfu", "ollama")
"""Whose times to the first token collation is held against."""
CLAIRVOYANT = ("farthest", "weighted")
OURS = ("past", "ours")


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell under every policy."""

    cell: Cell
    in_order: dict[str, Outcome]
    collated: Outcome
    least_load: float

    def reload_s(self, *names: str) -> float:
        """Return the reload seconds of the best of these policies, in arrival order."""
        return min(self.in_order[name].reload_s for name in names)

    def to_classic(self, name: str) -> float:
        """Reload seconds over those of the best classic policy, both in arrival order."""
        return self.reload_s(name) / self.reload_s(*CLASSIC)

    def to_clairvoyant(self, name: str) -> float:
        """Reload seconds over the better clairvoyant's, both in arrival order."""
        return self.reload_s(name) / self.reload_s(*CLAIRVOYANT)

    @property
    def collated_to_clairvoyant(self) -> float:
        """Collated reload seconds over the better clairvoyant's in arrival order."""
        return self.collated.reload_s / self.reload_s(*CLAIRVOYANT)

    @property
    def mean_to_slow(self) -> float:
        """Collated mean time to the first token over the best of LRU, LFU and Ollama's rule."""
        return self.collated.ttft_mean_s / min(self.in_order[n].ttft_mean_s for n in SLOW)

    @property
    def p99_to_slow(self) -> float:
        """The same of the 99th percentile."""
        return self.collated.ttft_p99_s / min(self.in_order[n].ttft_p99_s for n in SLOW)


def compare(cell: Cell) -> Compared:
    """Replay one cell under every policy in arrival order, and collated."""
    return Compared(
        cell,
        {name: in_order(cell, name) for name in POLICIES},
        replay_collated(cell),
        least_load(cell, wait_s=FAIRNESS_BOUND_S),
    )


def compare_all(trace: Path) -> list[Compared]:
    """Replay all cells."""
    arrivals = read_arrivals(trace)
    return [
        compare(make_cell(arrivals, alpha=alpha, seed=seed)) for alpha in ALPHAS for seed in SEEDS
    ]


def lines_of(compared: Compared) -> list[str]:
    """Return the machine-readable lines of a cell."""
    at = {"alpha": compared.cell.alpha, "seed": compared.cell.seed}
    lines = [
        json_line("eviction", **at, order="arrival", policy=name, **asdict(outcome))
        for name, outcome in compared.in_order.items()
    ]
    lines.append(
        json_line("eviction", **at, order="collated", policy="ours", **asdict(compared.collated))
    )
    ratios = {
        **{f"{name}_to_classic": compared.to_classic(name) for name in OURS},
        **{f"{name}_to_clairvoyant": compared.to_clairvoyant(name) for name in OURS},
        "collated_to_clairvoyant": compared.collated_to_clairvoyant,
        "collated_ttft_mean_to_best": compared.mean_to_slow,
        "collated_ttft_p99_to_best": compared.p99_to_slow,
        "least_load_for_bound": compared.least_load,
    }
    return [*lines, *(json_line("ratio", **at, key=k, value=v) for k, v in ratios.items())]


def table_in_order(cells: Sequence[Compared]) -> str:
    """Return the reload seconds in arrival order, a cell a row, in Markdown."""
    names = (*CLASSIC, "ollama", *CLAIRVOYANT, *OURS)
    heads = (*names, *(f"{name} / {of}" for of in ("classic", "clairvoyant") for name in OURS))
    rows = [f"| alpha | seed | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for cell_result in cells:
        figures = [f"{cell_result.in_order[name].reload_s:,.0f}" for name in names]
        figures += [f"{cell_result.to_classic(name):.3f}" for name in OURS]
        figures += [f"{cell_result.to_clairvoyant(name):.3f}" for name in OURS]
        rows.append(
            f"| {cell_result.cell.alpha} | {cell_result.cell.seed} | {' | '.join(figures)} |"
        )
    medians = [
        statistics.median(cell_result.to_classic(name) for cell_result in cells) for name in OURS
    ]
    medians += [
        statistics.median(cell_result.to_clairvoyant(name) for cell_result in cells)
        for name in OURS
    ]
    last = " | ".join(f"{median:.4f}" for median in medians)
    rows.append(f"| median | |{' |' * len(names)} {last} |")
    return "\n".join(rows)


def table_collated(cells: Sequence[Compared]) -> str:
    """Return what collation costs and gives, a cell a row, in Markdown."""
    rows = [
        (
            "| alpha | seed | reload s | / clairvoyant | mean TTFT s | best in order | p99 TTFT s "
            "| best in order | longest wait s | passed over | longest drain s | least load |"
        ),
        "|---" * 12 + "|",
    ]
    for cell_result in cells:
        ours = cell_result.collated
        mean_s = min(cell_result.in_order[name].ttft_mean_s for name in SLOW)
        p99_s = min(cell_result.in_order[name].ttft_p99_s for name in SLOW)
        rows.append(
            f"| {cell_result.cell.alpha} | {cell_result.cell.seed} | {ours.reload_s:,.0f} "
            f"| {cell_result.collated_to_clairvoyant:.3f} | {ours.ttft_mean_s:.1f} | {mean_s:,.0f} "
            f"| {ours.ttft_p99_s:.1f} | {p99_s:,.0f} | {ours.wait_max_s:.1f} "
            f"| {ours.passed_over} | {ours.drain_max_s:.1f} | {cell_result.least_load:.2f} |"
        )
    return "\n".join(rows)


def eviction_lines() -> list[str]:
    """Replay all cells; write the tables to standard error and return JSON lines."""
    cells = compare_all(real_input(*TRACE))
    sys.stderr.write(f"{table_in_order(cells)}\n\n{table_collated(cells)}\n")
    return [line for compared in cells for line in lines_of(compared)]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in eviction_lines()))
