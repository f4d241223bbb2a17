"""Switches off the fast paths that `mlxd doctor` found wrong or slow here.

Invariants:
- Only before the first load. The log says what is off and why.
- Unreadable findings switch nothing off, which is logged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlxd_shared.ops.findings import NONE_OFF, Off, UnreadableFindings, read_off, versions_of
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.machine.backend import Backend
from mlxd_worker.thread.engine_thread import EngineThread

_log = get_logger("worker")


async def switch_off(engine: EngineThread, findings: Path | None, backend: Backend) -> Off:
    """Switch off the paths in the file for this device and these versions; return them.

    findings: None means that there is no file.
    """
    if findings is None:
        return NONE_OFF
    device, versions = await engine.device_name(), versions_of(backend)
    try:
        off = await asyncio.to_thread(read_off, findings, device=device, versions=versions)
    except UnreadableFindings as error:
        _log.warning("findings cannot be read", file=str(findings), reason=str(error))
        return NONE_OFF
    SWITCHES.turn_off(off)
    for path, reason in off.items():
        _log.warning("a fast path is off", path=path.value, reason=reason, device=device)
    return off
