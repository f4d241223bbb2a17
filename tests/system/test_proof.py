"""A request is checked once on its way through a real controller to a real worker."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from mlxd.v1 import inference_pb2, inference_pb2_grpc
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.launcher.run_dir import RunDir
from mlxd_controller.launcher.survivors import survivors_of
from mlxd_controller.runtime.ports import Survivor
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import demo_model
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.proof import Checked
from mlxd_shared.wire.wire_scan import Size
from tests.support.calls import greedy
from tests.support.cli import LIMIT_S
from tests.support.doors import CHECKED, COUNTED, DOOR_VARIABLE, Watch
from tests.support.served import Served, serve
from tests.support.struck import NAME, struck_controller

MODEL = demo_model()
ONCE = [COUNTED, CHECKED]
LONG_ID = "r" * (config.REQUEST_ID_CHARS_MAX + 1)


@pytest.fixture(name="run_dir")
def short_folder() -> Iterator[Path]:
    """A run directory of the test's own, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        yield Path(folder)


@pytest.mark.asyncio
async def test_a_request_is_checked_at_the_controller_s_door_and_nowhere_else(
    tmp_path: Path,
) -> None:
    """Once, though its worker dies in the middle; whoever goes round the controller is checked."""
    door = tmp_path / "door"
    request = greedy(model=NAME, max_tokens=6)
    async with struck_controller(
        MODEL, environment={DOOR_VARIABLE: str(door)}, module="tests.support.doors"
    ) as struck:
        with Watch() as watch:
            whole = [m async for m in struck.inference.Generate(request)]
        assert (watch.seen, door.read_text()) == (ONCE, "")

        struck.strike(3)
        with Watch() as watch:
            moved = [m async for m in struck.inference.Generate(request)]
        assert moved[-1].usage.migrations == 1
        assert [m.token_ids for m in moved] == [m.token_ids for m in whole]
        assert (watch.seen, door.read_text()) == (ONCE, "")

        (worker,) = struck.runtime.workers.live()
        assert worker.process is not None
        async with grpc.aio.insecure_channel(worker.process.address) as channel:
            alone = inference_pb2_grpc.InferenceServiceStub(channel)
            async for _ in alone.Generate(greedy(max_tokens=1)):
                pass
        assert door.read_text().split() == ONCE


def files_in(run_dir: Path) -> list[Path]:
    """Return the records there."""
    return list(run_dir.glob("*.json"))


@asynccontextmanager
async def left_behind(run_dir: Path) -> AsyncIterator[tuple[Served, Path]]:
    """Yield a controller that was killed, and the record of the ready worker it has left."""
    options = ("--model", f"demo={MODEL}", "--run-dir", str(run_dir), "--orphan-grace", "60s")
    async with serve(*options, "--log-level", "debug") as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async for _ in stub.Generate(greedy(model="demo", max_tokens=2)):
                pass
        server.process.kill()
        await server.process.wait()
        (path,) = files_in(run_dir)
        yield server, path


@asynccontextmanager
async def taken_over(run_dir: Path, arguments: tuple[str, ...]) -> AsyncIterator[Survivor]:
    """Yield the worker, which follows this process now; it ends with the body."""
    held = RunDir.claim(run_dir)
    store = Library([("demo", MODEL)])
    try:
        async with survivors_of(held, store, GrpcLink, arguments=arguments) as survivors:
            (survivor,) = survivors
            yield survivor
    finally:
        held.close()


def record_at(path: Path) -> Record:
    """Return the record in a file."""
    record = WorkerFiles(path.parent, path.stem).read()
    assert record is not None
    return record


async def ids_of(survivor: Survivor, request: Checked) -> list[int]:
    """Return the ids of a whole stream."""
    stream = survivor.link.generate(request, timeout_s=LIMIT_S)
    ids: list[int] = []
    while (frame := await stream.read()) is not None:
        ids += inference_pb2.GenerateResponse.FromString(frame).token_ids
    return ids


def requests() -> tuple[Checked, Checked, Checked]:
    """Return a good request, and one that a worker refuses unless it was checked: as that, or not.

    A controller would have refused it; none sends it.
    """
    good, bad = (
        greedy(max_tokens=4, **fields).SerializeToString()
        for fields in ({}, {"request_id": LONG_ID})
    )
    size = Size(0, 16, 0)
    return Checked(good, size=size), Checked(bad, size=size), Checked(bad)


@pytest.mark.asyncio
async def test_a_worker_s_proof_goes_over_to_the_next_controller(run_dir: Path) -> None:
    """It lies in the record, which is private; and it is nowhere in what was written to a log."""
    async with left_behind(run_dir) as (server, path):
        record = record_at(path)
        assert record.proof is not None
        assert path.stat().st_mode & 0o777 == 0o600
        log = server.log_path.read_text(encoding="utf-8")
        assert "worker launched" in log
        assert record.proof.secret not in log
        async with taken_over(run_dir, record.arguments) as survivor:
            good, bad, doubted = requests()
            assert await ids_of(survivor, bad) == await ids_of(survivor, good)
            with pytest.raises(InvalidRequest):
                await ids_of(survivor, doubted)
            survivor.process.remember(survivor.holding)
            assert record_at(path) == record
    assert files_in(run_dir) == []


@pytest.mark.asyncio
async def test_a_worker_whose_record_has_no_proof_checks_again(run_dir: Path) -> None:
    """As a controller of before would have left it: taken over all the same."""
    async with left_behind(run_dir) as (_, path):
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        del fields["proof"]
        path.write_text(json.dumps(fields), encoding="utf-8")
        async with taken_over(run_dir, record_at(path).arguments) as survivor:
            good, bad, _ = requests()
            assert len(await ids_of(survivor, good)) == 4
            with pytest.raises(InvalidRequest):
                await ids_of(survivor, bad)
