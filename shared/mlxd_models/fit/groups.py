"""Devices that ranks of one model share: a group is a device of its own for plans. Pure.

Invariants:
- A group has a device for each rank, of one machine and one product. On a CPU, whose memory is one,
  all of its ranks are there.
- The figures of a group are those of one rank: the least that any of its devices has for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.devices import JOINT


def split_group(name: str) -> tuple[str, ...]:
    """Return the devices of a group by its name; of a device its own."""
    return tuple(name.split(JOINT))


def group_of(devices: Sequence[Device]) -> Device:
    """Return the group of these, one for each rank; of one the device itself."""
    if len(devices) == 1:
        return devices[0]
    counts = Counter(device.name for device in devices)
    limits = [device.models_max for device in devices if device.models_max is not None]

    def least(figures: Iterable[int]) -> int:
        pairs = zip(devices, figures, strict=True)
        return min(figure // counts[device.name] for device, figure in pairs)

    return replace(
        devices[0],
        name=JOINT.join(device.name for device in devices),
        total_bytes=least(device.total_bytes for device in devices),
        reserve_bytes=least(device.reserve_bytes for device in devices),
        budget_bytes=least(device.budget_bytes for device in devices),
        usable_bytes=least(device.usable_bytes for device in devices),
        held_bytes=0,
        id="",
        lost=any(device.lost for device in devices),
        models_max=min(limits, default=None),
        members=tuple(device.name for device in devices),
    )


def groups_of(devices: Sequence[Device], ranks: int) -> tuple[Device, ...]:
    """Return the groups of so many ranks that these devices make; of 1 the devices.

    Where a machine has very many, only those of neighbours that do not overlap. Workers that
    somebody else starts have their own number of ranks: their devices make no group.
    """
    own = [device for device in devices if not device.workers]
    if ranks == 1:
        return tuple(devices)
    groups = [group_of((device,) * ranks) for device in own if device.on_cpu]
    alike: dict[tuple[str, str, str], list[Device]] = defaultdict(list)
    for device in own:
        if not device.on_cpu:
            alike[device.node, device.kind, device.product].append(device)
    for several in alike.values():
        if comb(len(several), ranks) <= config.RANK_GROUPS_MAX:
            chosen = list(combinations(several, ranks))
        else:
            count = len(several) // ranks * ranks
            chosen = [tuple(several[at : at + ranks]) for at in range(0, count, ranks)]
        groups += map(group_of, chosen)
    return tuple(groups)
