"""Eviction that knows what prompts would cost again: reload seconds with that term and without.

    python -m tests.bench.eviction_prompts [--cells N] [--requests N]

The cells and the clock of `eviction`, in arrival order, under the controller's rule. Each model
draws what the next request would compute again after an eviction, in loads of the model: nothing,
where all of its prompts are on disk or it has none, up to twice a load, where prompts are long and
nothing is on disk. A model's first load finds no prompts and loses none. Nothing is timed: equal
inputs give equal figures on any machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.bench.eviction_cells import ALPHAS, MODELS, SEEDS, Cell, make_cell, read_arrivals
from tests.bench.eviction_policies import Cheapest, Uses
from tests.bench.eviction_replay import InOrder
from tests.bench.mooncake import TRACE
from tests.bench.report import json_line
from tests.real_inputs import real_input

AGAIN_LOADS = (0.0, 0.0, 0.25, 1.0, 2.0)
"""What a model's prompts cost again, in loads of it: on disk, or none, for two in five."""
WITH, WITHOUT = "with", "without"


@dataclass(frozen=True, slots=True)
class Lost:
    """What evictions cost, in seconds of a simulated clock."""

    reload_s: float
    prompts_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.reload_s + self.prompts_s


def draw_again_s(cell: Cell) -> tuple[float, ...]:
    """Return what each model's prompts cost again once they are gone."""
    draws = random.Random(cell.seed)
    return tuple(draws.choice(AGAIN_LOADS) * cell.reload_s(model) for model in range(MODELS))


def replay(cell: Cell, again_s: Sequence[float], *, knows: bool) -> Lost:
    """Replay a cell; `knows`: the rule weighs what prompts cost again."""

    def term(model: int) -> float:
        return again_s[model] if knows else 0.0

    machine = InOrder(cell, Cheapest(cell, Uses(cell).expect, again_s=term))
    outcome = machine.run()
    prompts_s = sum(max(loads - 1, 0) * again_s[model] for model, loads in enumerate(machine.loads))
    return Lost(outcome.reload_s, prompts_s)


def prompt_lines(cells: Sequence[Cell]) -> list[str]:
    """Replay cells with the term and without; return JSON lines, the medians of ratios last."""
    lines: list[str] = []
    reloads: list[float] = []
    totals: list[float] = []
    for cell in cells:
        again_s = draw_again_s(cell)
        lost = {name: replay(cell, again_s, knows=name == WITH) for name in (WITH, WITHOUT)}
        reloads.append(lost[WITH].reload_s / lost[WITHOUT].reload_s)
        totals.append(lost[WITH].total_s / lost[WITHOUT].total_s)
        at = {"alpha": cell.alpha, "seed": cell.seed}
        for name, figures in lost.items():
            lines.append(
                json_line(
                    "eviction_prompts",
                    **at,
                    term=name,
                    reload_s=figures.reload_s,
                    total_s=figures.total_s,
                )
            )
        sys.stderr.write(
            f"alpha {cell.alpha}, seed {cell.seed}: with the term reload seconds "
            f"{reloads[-1]:.3f} times, seconds lost in all {totals[-1]:.3f} times\n"
        )
    lines.append(json_line("ratio", key="prompts.reload_s", value=statistics.median(reloads)))
    lines.append(json_line("ratio", key="prompts.total_s", value=statistics.median(totals)))
    return lines


def main() -> None:
    """Replay the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=len(ALPHAS) * len(SEEDS))
    parser.add_argument("--requests", type=int, help="of each cell, the first; all")
    args = parser.parse_args()
    arrivals = read_arrivals(real_input(*TRACE))
    settings = [(alpha, seed) for seed in SEEDS for alpha in ALPHAS][: args.cells]
    cells = [make_cell(arrivals, alpha=alpha, seed=seed) for alpha, seed in settings]
    cells = [replace(cell, requests=cell.requests[: args.requests]) for cell in cells]
    sys.stdout.write("".join(f"{line}\n" for line in prompt_lines(cells)))


if __name__ == "__main__":
    main()
