"""Fit: a sum of named terms, what is asked for is never changed, what is open is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_models.fit.facts import Taken
from mlxd_models.fit.plan import Device, Plan
from mlxd_models.fit.planner import plan_load, shorter_contexts
from mlxd_models.fit.terms import (
    CUDA_CONTEXT_BYTES,
    HEAP_BYTES,
    PROCESS_BYTES,
    TOKENIZER_FACTOR,
    WIDENING_BYTES,
)
from mlxd_models.sizes.arena_sizes import kv_tokens_bound, slots_bound
from mlxd_models.sizes.cache_sizes import RECURRENT_STEP_LAYERS, CacheSizes, WindowedLayers
from mlxd_models.sizes.pass_sizes import POOL_CUDA_NBYTES_MAX, POOL_NBYTES
from mlxd_shared.config import MIB, ROWS_MAX_DEFAULT
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from tests.support.model_facts import device, facts

TERMS = ("weights", "kv", "prefix", "activations", "pool", "process")
WIDE = device(1 << 20)
# 2 KiB of keys and values a token: what a context costs is easy to see.
LONG = replace(
    facts(10, context_max=1 << 16), caches=CacheSizes(4 * 2 * 64, kv_heads=8, head_dim=8)
)
HALVES = replace(facts(100), stored_bytes=50 * MIB, item_bytes=2)


def by_name(plan: Plan) -> dict[str, int]:
    """Return the terms by name."""
    return {term.name: term.nbytes for term in plan.terms}


def test_the_need_is_the_sum_of_its_terms() -> None:
    """Every term is there, by name, with a note, and nothing else is counted."""
    plan = plan_load(facts(10), LoadSpec(), WIDE)

    assert tuple(term.name for term in plan.terms) == TERMS
    assert plan.need_bytes == sum(term.nbytes for term in plan.terms)
    assert all(term.note for term in plan.terms)


def test_keys_and_values_are_counted_to_the_byte() -> None:
    """KV is context (in classes of 256) x rows x layers x 2 x heads x width x item."""
    spec = LoadSpec(context_length=300, rows_max=3)
    plan = plan_load(facts(10), spec, WIDE)

    layer = 2 * 1 * 8 * 4 * 512 * 3
    assert by_name(plan)["kv"] == 2 * layer


def test_what_is_left_open_is_the_models_own() -> None:
    """Without options: the model's whole context, and the default number of rows."""
    plan = plan_load(facts(10), LoadSpec(), WIDE)

    assert (plan.context_length, plan.rows_max) == (1024, ROWS_MAX_DEFAULT)


def test_a_context_that_was_asked_for_is_never_shortened() -> None:
    """Asked for and too large: the plan says so, and keeps what was asked for."""
    small = device(200)
    plan = plan_load(LONG, LoadSpec(context_length=1 << 16), small)

    assert plan.context_length == 1 << 16
    assert plan.need_bytes > small.budget_bytes


def test_an_open_context_is_the_largest_power_of_two_that_fits() -> None:
    """Left open and too large: the next power of two that fits; twice as much would not."""
    small = device(400)
    plan = plan_load(LONG, LoadSpec(), small)

    assert plan.need_bytes <= small.budget_bytes
    assert plan.context_length & (plan.context_length - 1) == 0
    twice = LoadSpec(context_length=plan.context_length * 2, weights=plan.weights)
    assert plan_load(LONG, twice, small).need_bytes > small.budget_bytes


def test_a_cpu_takes_float32_where_it_fits_and_stored_where_not() -> None:
    """On a CPU other products are scalar loops: float32 first, as stored where memory is short."""
    assert plan_load(HALVES, LoadSpec(), WIDE).weights is Weights.FLOAT32
    tight = device(plan_load(HALVES, LoadSpec(), WIDE).need_bytes // MIB - 20)
    plan = plan_load(HALVES, LoadSpec(), tight)
    assert plan.weights is Weights.STORED
    assert by_name(plan)["weights"] == 50 * MIB


def test_a_gpu_keeps_weights_as_stored() -> None:
    """Elsewhere the stored form is the fast one."""
    gpu = replace(WIDE, kind=DeviceKind.METAL)
    assert plan_load(HALVES, LoadSpec(), gpu).weights is Weights.STORED


@pytest.mark.parametrize("weights", [Weights.FLOAT32, Weights.BFLOAT16, Weights.STORED])
def test_a_forced_form_is_taken(weights: Weights) -> None:
    """The operator's form stands, on every device."""
    plan = plan_load(HALVES, LoadSpec(weights=weights), WIDE)

    assert plan.weights is weights
    size = {Weights.FLOAT32: 100, Weights.BFLOAT16: 50, Weights.STORED: 50}[weights]
    assert by_name(plan)["weights"] == size * MIB


def roomy(*, prefix_fraction: float = 0.25) -> Device:
    """A device on which a quarter goes to former prompts by default."""
    return device(4000, prefix_fraction=prefix_fraction)


def test_an_open_prefix_cache_is_a_share_of_the_device() -> None:
    """A fraction of the budget, and the note says which."""
    plan = plan_load(facts(10), LoadSpec(), roomy())

    assert plan.prefix_bytes == by_name(plan)["prefix"] == 1000 * MIB
    assert next(term.note for term in plan.terms if term.name == "prefix").startswith("25%")


@pytest.mark.parametrize("nbytes", [0, 3 * MIB, 9000 * MIB])
def test_a_prefix_cache_that_was_asked_for_stands(nbytes: int) -> None:
    """To the byte, none at all included; one that does not fit makes the plan not fit."""
    plan = plan_load(facts(10), LoadSpec(prefix_cache_nbytes=nbytes), roomy())

    assert plan.prefix_bytes == nbytes
    assert plan.least_bytes == plan.need_bytes
    assert (plan.need_bytes <= roomy().budget_bytes) == (nbytes < 4000 * MIB)


def test_an_open_prefix_cache_gives_way_before_anything_else() -> None:
    """It shrinks to what is left, down to nothing, while context and form stay the best."""
    alone = plan_load(LONG, LoadSpec(prefix_cache_nbytes=0), WIDE)
    tight = device(alone.need_bytes // MIB + 7, prefix_fraction=0.5)
    plan = plan_load(LONG, LoadSpec(), tight)

    assert (plan.context_length, plan.weights) == (alone.context_length, alone.weights)
    assert 6 * MIB < plan.prefix_bytes <= 7 * MIB
    assert plan.need_bytes == tight.budget_bytes
    tighter = device(alone.need_bytes // MIB - 1, prefix_fraction=0.5)
    shortened = plan_load(LONG, LoadSpec(), tighter)
    assert shortened.context_length < alone.context_length
    assert shortened.prefix_bytes > 0, "what the shorter context leaves"


def test_a_plan_takes_of_its_prefix_cache_what_the_room_allows() -> None:
    """An open one is cut to the room, never below nothing; one that was asked for is not."""
    plan = plan_load(facts(10), LoadSpec(), roomy())
    assert plan.within(plan.need_bytes) == plan
    cut = plan.within(plan.least_bytes + 5)
    assert (cut.prefix_bytes, cut.need_bytes) == (5, plan.least_bytes + 5)
    assert plan.within(0).need_bytes == plan.least_bytes
    chosen_plan = plan_load(facts(10), LoadSpec(prefix_cache_nbytes=MIB), roomy())
    assert chosen_plan.within(0) == chosen_plan


def test_quantised_keys_and_values_take_what_they_are_packed_into() -> None:
    """Bits and, for each group of 64, a scale and a bias in the model's form."""
    wide = replace(facts(10), caches=CacheSizes(4 * 128, kv_heads=1, head_dim=128))
    tokens = 1024 * ROWS_MAX_DEFAULT
    for kv_format, bits in ((KVFormat.Q8, 8), (KVFormat.Q4, 4)):
        plan = plan_load(wide, LoadSpec(kv_format=kv_format), WIDE)
        assert plan.kv_format is kv_format
        assert by_name(plan)["kv"] == tokens * 4 * (128 * bits // 8 + 2 * 2 * 4)


def test_windows_and_states_are_counted_by_their_own_sizes() -> None:
    """A window's positions end at its width, and takes no more than a row does; a state is there
    once a row, in float32, always, and some layers' once more while a step replaces them."""
    caches = CacheSizes(
        kv_values_per_token=32,
        kv_heads=1,
        head_dim=32,
        windows=(WindowedLayers(100, kv_values_per_token=128), WindowedLayers(512, 64)),
        recurrent_values_per_row=14,
        recurrent_layers=2,
    )
    spec = LoadSpec(context_length=300, rows_max=2, weights=Weights.BFLOAT16)
    model = replace(facts(10), caches=caches)
    tokens, slots = kv_tokens_bound(300, 2), slots_bound(2)
    sliding, states = slots * 100 * 128 * 2, 2 * (14 + RECURRENT_STEP_LAYERS * 7) * 4

    assert tokens == 2 * 512
    sliding += tokens * 64 * 2
    whole = tokens * 32 * 2
    assert by_name(plan_load(model, spec, WIDE))["kv"] == whole + sliding + states
    packed = plan_load(model, replace(spec, kv_format=KVFormat.Q8), WIDE)
    assert by_name(packed)["kv"] == tokens * (32 + 2 * 2) + sliding + states


def test_unpacking_counts_as_activations() -> None:
    """Two layers' keys and values of all rows on a CPU, of one row elsewhere."""
    model = replace(facts(10), caches=CacheSizes(16 * 128, kv_heads=1, head_dim=64))
    spec = LoadSpec(rows_max=4, weights=Weights.FLOAT32)
    for kind, rows in ((DeviceKind.CPU, 4), (DeviceKind.METAL, 1)):
        here = replace(WIDE, kind=kind)
        plain = plan_load(model, spec, here)
        packed = plan_load(model, replace(spec, kv_format=KVFormat.Q4), here)
        more = by_name(packed)["activations"] - by_name(plain)["activations"]
        assert more == 2 * 128 * 1024 * rows * 4


def test_unpacked_weights_count_where_they_stay_packed() -> None:
    """What is unpacked for a prompt is there beside weights as stored, and beside no others."""
    whole = replace(facts(10), item_bytes=2)
    model = replace(whole, unpacked_values=1000)
    for weights, more in ((Weights.STORED, 2 * 1000), (Weights.FLOAT32, 0), (Weights.BFLOAT16, 0)):
        spec = LoadSpec(weights=weights)
        plans = [plan_load(each, spec, WIDE) for each in (model, whole)]
        activations, without = (by_name(plan)["activations"] for plan in plans)
        assert activations == without + more


def test_a_load_that_puts_large_tensors_together_is_within_its_need() -> None:
    """Where what runs later takes less than a tensor in two forms and its parts, that counts."""
    tied = Taken(values=50 * MIB, stored_bytes=100 * MIB, joined=False)
    joined = Taken(values=30 * MIB, stored_bytes=60 * MIB, joined=True)
    model = replace(HALVES, taken=(tied, joined))
    spec = LoadSpec(weights=Weights.FLOAT32, prefix_cache_nbytes=0)
    plan = plan_load(model, spec, WIDE)
    assert by_name(plan)["activations"] + by_name(plan)["kv"] == (60 + 4 * 30) * MIB
    as_it_is = plan_load(model, replace(spec, weights=Weights.STORED), WIDE)
    assert by_name(as_it_is)["activations"] + by_name(as_it_is)["kv"] == 60 * MIB
    early = replace(joined, later_values=10 * MIB, later_bytes=20 * MIB)
    not_last = plan_load(replace(model, taken=(early,)), spec, WIDE)
    assert (
        by_name(not_last)["activations"] + by_name(not_last)["kv"] == (60 + 4 * 30 - 4 * 10) * MIB
    )
    kept = plan_load(model, replace(spec, prefix_cache_nbytes=500 * MIB), WIDE)
    assert by_name(kept)["activations"] == by_name(plan_load(HALVES, spec, WIDE))["activations"]


def test_what_is_stored_and_not_kept_is_no_need() -> None:
    """A copy of a tied head is left out of weights as stored."""
    model = replace(HALVES, dropped_bytes=7 * MIB)
    plan = plan_load(model, LoadSpec(weights=Weights.STORED), WIDE)
    assert by_name(plan)["weights"] == 43 * MIB


def test_a_tokenizer_counts_by_its_file() -> None:
    """A process takes more for a larger one."""
    model = replace(facts(10), tokenizer_bytes=MIB)
    more = by_name(plan_load(model, LoadSpec(), WIDE))["process"]
    assert more - PROCESS_BYTES - HEAP_BYTES == TOKENIZER_FACTOR * MIB


def test_on_a_cuda_gpu_a_process_is_its_context() -> None:
    """What a driver keeps for each process is of the GPU's memory; the process itself is not."""
    model = replace(facts(10), tokenizer_bytes=MIB)
    gpu = plan_load(model, LoadSpec(), replace(WIDE, kind=DeviceKind.CUDA))
    assert by_name(gpu)["process"] == CUDA_CONTEXT_BYTES
    metal = plan_load(model, LoadSpec(), replace(WIDE, kind=DeviceKind.METAL))
    assert by_name(metal)["process"] == by_name(plan_load(model, LoadSpec(), WIDE))["process"]


def test_a_cuda_gpus_pool_holds_what_its_rows_make() -> None:
    """Twice a step's arrays, within bounds: a byte a value, and in all; elsewhere it is fixed."""

    def pool(values: int, rows: int, *, hidden: int = 1000, kind: str = "cuda") -> int:
        model = facts(10)
        sizes = replace(model.passes, hidden=hidden)
        model = replace(model, elements=values, passes=sizes, item_bytes=2)
        spec = LoadSpec(weights=Weights.STORED, rows_max=rows)
        return by_name(plan_load(model, spec, device(1 << 20, kind=kind)))["pool"]

    assert pool(500_000_000, 128) == 2 * 128 * 500_000 * 2
    assert pool(500_000_000, 64) == 2 * 64 * 500_000 * 2
    assert pool(500_000_000, 64, hidden=100) == 500_000_000
    assert pool(8_000_000_000, 128) == POOL_CUDA_NBYTES_MAX
    assert pool(500_000_000, 2) == pool(1_000_000, 128) == POOL_NBYTES
    assert pool(500_000_000, 128, hidden=1) == POOL_NBYTES, "a width that is not known"
    for kind in ("cpu", "metal"):
        assert pool(8_000_000_000, 128, kind=kind) == POOL_NBYTES


def test_a_process_that_widens_weights_takes_more() -> None:
    """What reads halves as float32 is counted; whoever keeps a form does not need it."""
    taken = {
        (model.item_bytes, form): by_name(plan_load(model, LoadSpec(weights=form), WIDE))["process"]
        for model in (facts(100), HALVES)
        for form in (Weights.FLOAT32, Weights.STORED)
    }

    plain = taken[4, Weights.STORED]
    assert taken == {
        (4, Weights.FLOAT32): plain,
        (4, Weights.STORED): plain,
        (2, Weights.FLOAT32): plain + WIDENING_BYTES,
        (2, Weights.STORED): plain,
    }


@pytest.mark.parametrize(
    ("context", "shorter"),
    [(8, []), (256, []), (257, [256]), (2000, [1024, 512, 256])],
)
def test_an_open_context_is_shortened_by_powers_of_two(context: int, shorter: list[int]) -> None:
    """Nothing below the floor is tried."""
    assert list(shorter_contexts(context)) == shorter


def test_an_open_context_gives_way_to_faster_weights() -> None:
    """Keys and values of a huge context rule float32 out only where a useful context does, too."""
    model = replace(LONG, stored_bytes=LONG.stored_bytes // 2, item_bytes=2)
    useful = plan_load(model, LoadSpec(context_length=4096, weights=Weights.FLOAT32), WIDE)
    exact = replace(WIDE, budget_bytes=useful.need_bytes)

    fits = plan_load(model, LoadSpec(), exact)
    short = plan_load(model, LoadSpec(), replace(exact, budget_bytes=useful.need_bytes - 1))

    assert (fits.weights, fits.context_length) == (Weights.FLOAT32, 4096)
    assert (short.weights, short.context_length) == (Weights.STORED, 8192)


def test_a_model_that_fits_nowhere_gets_its_smallest_plan() -> None:
    """Without room for anything it is in the smallest form and context."""
    model = replace(LONG, stored_bytes=LONG.stored_bytes // 2, item_bytes=2)
    plan = plan_load(model, LoadSpec(), device(1))

    assert (plan.weights, plan.context_length) == (Weights.STORED, 256)


def test_a_process_that_is_there_already_counts_no_more() -> None:
    """A worker that plans for itself has what its process takes behind it, on every device."""
    for kind in DeviceKind:
        here = replace(WIDE, kind=kind)
        plan, alone = (
            plan_load(HALVES, LoadSpec(), replace(here, holds_process=there))
            for there in (False, True)
        )
        assert by_name(alone) == by_name(plan) | {"process": 0}
