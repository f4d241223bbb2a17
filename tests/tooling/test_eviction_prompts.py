"""The replay of eviction that knows what prompts cost again: by hand, and on a slice of a trace."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.bench.eviction_cells import MODELS, Cell, Request, make_cell, read_arrivals
from tests.bench.eviction_prompts import AGAIN_LOADS, Lost, draw_again_s, prompt_lines, replay
from tests.bench.mooncake import TRACE
from tests.real_inputs import real_input

A, B, C = 0, 1, 2


def cell_of(*models: int) -> Cell:
    """Return a cell of models of size 4, which load in 6 s, with room for two of them."""
    requests = tuple(Request(100.0 * at, model, 0.0, 0.0) for at, model in enumerate(models))
    return Cell(1.0, 1, (4,) * MODELS, 8, requests)


def test_the_model_whose_prompts_are_on_disk_goes_first() -> None:
    """A and B are used alike, and C needs room. With the term it is made of B, whose prompts are on
    disk; without, as both loads cost the same, of A, whose prompts are computed again.
    """
    again_s = (30.0, 0.0, *[0.0] * (MODELS - 2))
    cell = cell_of(A, B, A, B, C, A, B)

    assert replay(cell, again_s, knows=True) == Lost(reload_s=24.0, prompts_s=0.0)
    assert replay(cell, again_s, knows=False).prompts_s == 30.0


def test_without_prompts_the_term_changes_nothing() -> None:
    """Where nothing would be computed again, the rule with it chooses as without."""
    nothing = (0.0,) * MODELS
    arrivals = read_arrivals(real_input(*TRACE))
    cell = make_cell(arrivals, alpha=1.0, seed=1)
    cell = replace(cell, requests=cell.requests[:1500])

    assert replay(cell, nothing, knows=True) == replay(cell, nothing, knows=False)
    (first, *_, reload_line, total_line) = map(json.loads, prompt_lines([cell]))
    assert first["reload_s"] > 0
    assert total_line["value"] <= 1.0
    assert reload_line["value"] <= 1.1
    assert max(draw_again_s(cell)) <= max(AGAIN_LOADS) * max(cell.reload_s(m) for m in range(12))
