"""The replay of eviction that knows what prompts cost again: by hand, and on a slice of a trace."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.bench.eviction_cells import MODELS, Cell, Request, make_cell, read_arrivals
from tests.bench.eviction_prompts import Lost, prompt_lines, replay
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


def slice_of_the_trace() -> Cell:
    """Return the beginning of a cell of the bench."""
    cell = make_cell(read_arrivals(real_input(*TRACE)), alpha=1.0, seed=1)
    return replace(cell, requests=cell.requests[:1500])


def test_without_prompts_the_term_changes_nothing() -> None:
    """Where nothing would be computed again, the rule with it chooses as without."""
    cell, nothing = slice_of_the_trace(), (0.0,) * MODELS
    assert replay(cell, nothing, knows=True) == replay(cell, nothing, knows=False)


def test_with_the_term_fewer_prompts_are_computed_again() -> None:
    """On real arrivals, for about as many seconds of loads; the lines say both."""
    with_term, without, reloads, totals = map(json.loads, prompt_lines([slice_of_the_trace()]))
    prompts_s = [line["total_s"] - line["reload_s"] for line in (with_term, without)]
    assert 0 < prompts_s[0] < prompts_s[1]
    assert reloads["value"] == with_term["reload_s"] / without["reload_s"] < 1.05
    assert totals["value"] == with_term["total_s"] / without["total_s"] < 1.01
