"""Made-up models for tests of the scheduler: sizes that are easy to add up."""

from __future__ import annotations

from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.plan import Device
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_models.sizes.pass_sizes import PassSizes
from mlxd_shared.config import MIB
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec

CONTEXT_MAX = 1024


def facts(weights_mib: int, *, context_max: int = CONTEXT_MAX) -> ModelFacts:
    """Return a model whose float32 weights take `weights_mib`, and little else takes much."""
    return ModelFacts(
        architecture="LlamaForCausalLM",
        stored_bytes=weights_mib * MIB,
        elements=weights_mib * MIB // 4,
        item_bytes=4,
        caches=CacheSizes(kv_values_per_token=2 * 2 * 1 * 8, kv_heads=1, head_dim=8),
        passes=PassSizes(hidden=16, projected=(2 + 2 * 1) * 8, mlp=32, heads=2, vocab=64),
        context_length_max=context_max,
    )


def device(
    budget_mib: int,
    *,
    usable_mib: int | None = None,
    kind: str = "cpu",
    prefix_fraction: float = 0.0,
    name: str = "cpu",
) -> Device:
    """Return a device with a budget, all of it usable unless said otherwise.

    A prefix cache takes nothing of it unless asked for, so that needs are easy to add up.
    """
    budget = budget_mib * MIB
    usable = budget if usable_mib is None else usable_mib * MIB
    return Device(name, DeviceKind(kind), 2 * budget, budget, budget, usable, prefix_fraction)


def need_mib(weights_mib: int, *, kind: str = "cpu") -> int:
    """Return the whole need of `facts(weights_mib)` by default, in MiB, rounded up."""
    plan = plan_load(facts(weights_mib), LoadSpec(), device(1 << 20, kind=kind))
    return -(-plan.need_bytes // MIB)
