"""Which stepper a model gets: by what it can do, by its caches, and never by asking again."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.speculation.speculator import Speculator
from mlxd_worker.engine.stepping.ahead import Ahead, Lead
from mlxd_worker.engine.stepping.choose import Way, choose, main_road, way_of
from mlxd_worker.engine.stepping.joined import Joined
from mlxd_worker.engine.stepping.plain import Plain
from mlxd_worker.models.base import Capabilities
from tests.worker.tiny import config_with, load, write_model

CONTEXT, HEAD_DIM = 512, 32
DENSE = Capabilities(on_cpu=True, stays_lazy=True, joins_passes=True)
EXPERTS = Capabilities(on_cpu=True, joins_passes=True)
PACKED = Capabilities(on_cpu=True, stays_lazy=True)
METAL = Capabilities(on_cpu=False, stays_lazy=True, joins_passes=True)
CUDA = Capabilities(on_cpu=False, stays_lazy=True, decodes_in_place=True)
COMPILED = Capabilities(on_cpu=False, decodes_in_place=True, overlaps_steps=True)


def layer(*, window: int | None = None, kv: KVFormat = KVFormat.MODEL) -> LayerCache:
    """Return an empty cache of attention."""
    geometry = AttentionGeometry(1, HEAD_DIM, window=window)
    return geometry.new_cache(mx.float32, kv=kv, context_max=CONTEXT)


def caches_of(kind: str, *, few_shapes: bool = False) -> RowCaches:
    """Return the caches of two layers, the second one of a kind of its own."""
    second: dict[str, LayerCache | None] = {
        "standard": layer(),
        "sliding": layer(window=64),
        "quantised": layer(kv=KVFormat.Q8),
        "nothing": None,
        "recurrent": RecurrentCache([RowState("tail", (3, 4), mx.float32)]),
    }
    layers = [layer(), second[kind]]
    return RowCaches(layers, context_max=CONTEXT, rows_max=4, bounded_shapes=few_shapes)


@pytest.mark.parametrize(
    ("able", "kind", "lead", "joins"),
    [
        (DENSE, "standard", Lead.MADE_UP, True),
        (EXPERTS, "standard", None, True),
        (PACKED, "standard", Lead.MADE_UP, False),
        (DENSE, "sliding", None, False),
        (DENSE, "quantised", None, False),
        (DENSE, "nothing", None, False),
        (DENSE, "recurrent", None, False),
    ],
)
def test_on_a_cpu_steps_are_made_up_and_joined_over_standard_caches(
    able: Capabilities, kind: str, lead: Lead | None, *, joins: bool
) -> None:
    """Where every layer keeps all keys as they are, a step that evaluates nothing by itself is made
    up ahead, and passes that read weights once are joined; rows guess but over recurrent states.
    """
    assert way_of(able, caches_of(kind)) == Way(lead, joins=joins, guesses=kind != "recurrent")


@pytest.mark.parametrize(
    ("able", "lead"), [(METAL, None), (CUDA, None), (COMPILED, Lead.DISPATCHED)]
)
def test_on_a_gpu_only_steps_that_overlap_run_ahead(able: Capabilities, lead: Lead | None) -> None:
    """There a step is dispatched ahead where it writes in place; with few shapes none is joined."""
    caches = caches_of("standard", few_shapes=True)

    assert way_of(able, caches) == Way(lead, joins=False, guesses=True)


def test_plain_steps_know_nothing_of_guesses(tmp_path: Path) -> None:
    """Only rows that may guess have a speculator, and it stands on what all others have."""
    model = load(write_model(tmp_path, config_with()))

    assert isinstance(choose(model, caches_of("recurrent")), Plain)
    assert isinstance(choose(model, caches_of("sliding")), Speculator)
    for guesses in (False, True):
        way = Way(Lead.MADE_UP, joins=False, guesses=guesses)
        assert isinstance(main_road(model, caches_of("standard"), way), Ahead)


def test_a_stepper_that_joins_runs_ahead_as_one_that_does_not(tmp_path: Path) -> None:
    """What is under way is the same stepper's, whatever stands around it."""
    model, caches = load(write_model(tmp_path, config_with())), caches_of("standard")
    joined = main_road(model, caches, Way(Lead.MADE_UP, joins=True, guesses=True))

    assert isinstance(joined, Joined)
    assert (joined.joins, joined.guesses, joined.ahead) == (True, False, False)
    assert choose(model, caches).guesses
