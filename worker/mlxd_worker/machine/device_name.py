"""What the device calls itself by which findings about it are remembered; on the engine thread."""

from __future__ import annotations

import platform

import mlx.core as mx

from mlxd_shared.domain.devices import DeviceKind
from mlxd_worker.machine.cores import available_cores


def device_name(kind: DeviceKind) -> str:
    """Return one line: kind and product, and of a CPU the cores that this process may use."""
    product = " ".join(str(mx.device_info().get("device_name") or platform.machine()).split())
    cores = f", {available_cores()} cores" if kind is DeviceKind.CPU else ""
    return f"{kind.value}: {product}{cores}"
