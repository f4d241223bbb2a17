"""A worker that starts leaves out what was found wrong or slow on its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import FINDINGS_FILE, Proved, remember, versions_of
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.machine.device_name import device_name
from mlxd_worker.thread.switching import switch_off
from tests.support.engine_threads import kind, running_engine, worker_on

OFF = {FastPath.LANES: "1.5 times as long as without"}


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """What a test switches off is on again behind it."""
    with SWITCHES.without():
        yield


@pytest.mark.asyncio
async def test_findings_about_this_device_are_heeded(tmp_path: Path) -> None:
    """What is off is said in the log, and off; another device's findings are nobody's here."""
    async with running_engine() as running:
        backend = worker_on(running).identity.backend
        remember(tmp_path, Proved("another", versions_of(backend), OFF))
        assert await switch_off(running.engine, tmp_path / FINDINGS_FILE, backend) == {}
        assert SWITCHES.is_on(FastPath.LANES)
        assert await running.engine.device_name() == device_name(kind())
        remember(tmp_path, Proved(device_name(kind()), versions_of(backend), OFF))
        with capture_logs() as lines:
            off = await switch_off(running.engine, tmp_path / FINDINGS_FILE, backend)
        newer = replace(backend, version="99")
        assert await switch_off(running.engine, tmp_path / FINDINGS_FILE, newer) == {}
        assert await switch_off(running.engine, None, backend) == {}

    assert off == OFF
    assert not SWITCHES.is_on(FastPath.LANES)
    words = [(line["event"], line["path"]) for line in lines if "path" in line]
    assert words == [("a fast path is off", "lanes")]


@pytest.mark.asyncio
async def test_findings_that_cannot_be_read_switch_nothing_off(tmp_path: Path) -> None:
    """The worker starts, and says why."""
    (tmp_path / FINDINGS_FILE).write_text("{")
    async with running_engine() as running:
        backend = worker_on(running).identity.backend
        with capture_logs() as lines:
            assert await switch_off(running.engine, tmp_path / FINDINGS_FILE, backend) == {}

    # The engine may also speak of arrays that other tests of this process have left.
    words = [line["event"] for line in lines if "findings" in line["event"]]
    assert words == ["findings cannot be read"]
    assert all(SWITCHES.is_on(path) for path in FastPath)
