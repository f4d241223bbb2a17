"""A controller that is killed and started again: its ready workers serve on, all else is purged."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)
from mlxd_controller.launcher.records import Record, WorkerFiles
from mlxd_controller.runtime.ports import Holding
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.known_process import KnownProcess, ProcessMark, mark_of
from mlxd_shared.wire.records import duration_to_pb
from tests.support.calls import greedy
from tests.support.cli import LIMIT_S, mlxd
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import running_worker

CONTEXT = 16384
READY, LOADING = types_pb2.MODEL_STATE_READY, types_pb2.MODEL_STATE_LOADING
FIXED = 12_288
"""A context that is not the model's own, and as good as endless, too."""
SILENT = "5s"
"""Far more than a worker that lives takes to answer, on a machine with too much to do."""
TRIES_MAX = 5
STEMS = [f"0123abcd-{number:x}" for number in range(8)]


@dataclass(slots=True)
class Session:
    """A connection to a controller, or to a worker."""

    channel: grpc.aio.Channel
    server: Served | None = None
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)
    status: status_pb2_grpc.StatusServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)

    async def stream(
        self, request: inference_pb2.GenerateRequest
    ) -> list[inference_pb2.GenerateResponse]:
        """Return a whole stream."""
        return [message async for message in self.inference.Generate(request)]

    async def ids(self, **fields: object) -> list[int]:
        """Return the ids of a short greedy stream."""
        call = self.inference.Generate(greedy(model="tiny", max_tokens=8, **fields))
        return [i async for message in call for i in message.token_ids]

    async def workers(self) -> list[status_pb2.WorkerStatus]:
        """Return those of the status that live."""
        workers = (await self.status.GetStatus(status_pb2.GetStatusRequest())).status.workers
        return [worker for worker in workers if not worker.HasField("exit_code")]

    async def state(self) -> types_pb2.ModelState.ValueType:
        """Return the model's state."""
        (model,) = (await self.models.ListModels(model_pb2.ListModelsRequest())).models
        return model.state

    async def until(self, holds: Callable[[status_pb2.Status], bool]) -> None:
        """Wait until the status is as `holds` wants it."""
        request = status_pb2.WatchStatusRequest(interval=duration_to_pb(0.1))
        watch = self.status.WatchStatus(request)
        async with asyncio.timeout(LIMIT_S):
            async for message in watch:
                if holds(message.status):
                    break
        watch.cancel()


@pytest.fixture(name="tiny", scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real model with a long context."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_max=CONTEXT)


@pytest.fixture(name="run_dir")
def short_folder() -> Iterator[Path]:
    """A run directory of the test's own, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        yield Path(folder)


@asynccontextmanager
async def controller(tiny: Path, run_dir: Path, *options: str) -> AsyncIterator[Session]:
    """Serve the model around the body; then stop, unless the body has killed it."""
    serve_options = ("--model", f"tiny={tiny}", "--run-dir", str(run_dir), "--orphan-grace", "60s")
    async with (
        serve(*serve_options, *options) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield Session(channel, server)


async def kill(its: Session) -> None:
    """End the controller as nothing can prevent."""
    assert its.server is not None
    its.server.process.kill()
    await its.server.process.wait()


def only_record(run_dir: Path) -> Record:
    """Return what is written of the one worker that a controller has left."""
    (path,) = run_dir.glob("*.json")
    record = WorkerFiles(run_dir, path.stem).read()
    assert record is not None
    return record


async def killed_while_loading(tiny: Path, run_dir: Path) -> ProcessMark:
    """Kill a controller during a load; return its worker, which that has not called ready.

    A load that was over sooner than the blow fell is made again.
    """
    for _ in range(TRIES_MAX):
        async with controller(tiny, run_dir) as its:
            assert its.server is not None
            await its.models.UnloadModel(model_pb2.UnloadModelRequest(model="tiny"))
            async for step in its.models.LoadModel(model_pb2.LoadModelRequest(model="tiny")):
                if step.model.progress.stage not in ("", "starting"):
                    break
            (process,) = psutil.Process(its.server.process.pid).children()
            mark = mark_of(process.pid)
            assert mark is not None
            await kill(its)
        if only_record(run_dir).holding is None:
            return mark
    raise AssertionError("every load was over before its controller was killed")


def ended_by(status: status_pb2.Status, code: str) -> float:
    """Return how many streams have ended with this code."""
    return sum(
        point.value
        for family in status.metrics
        if family.name == "mlxd_requests_total"
        for point in family.points
        if point.labels["code"] == code
    )


def names_in(folder: Path) -> list[str]:
    """Return what lies there, with the names of workers left out."""
    return sorted(re.sub(r"^[0-9a-f]{8}-[0-9a-f]+", "", path.name) for path in folder.iterdir())


async def end_of(mark: ProcessMark) -> None:
    """Wait until a process has ended."""
    ended = asyncio.Event()
    try:
        known = KnownProcess(mark)
    except ProcessLookupError:
        return
    known.watch(ended.set)
    await asyncio.wait_for(ended.wait(), LIMIT_S)


@asynccontextmanager
async def bystander() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has nothing to do with mlxd."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    try:
        yield process
        assert process.returncode is None, "it was none of ours"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.asyncio
async def test_a_ready_worker_outlives_its_controller_and_serves_the_next(
    tiny: Path, run_dir: Path
) -> None:
    """The same process, without a load; an interrupted stream is continued; what was fixed holds.

    In between it serves on its own socket, and the dead controller's stream, cut off long before
    its end, has left no row.
    """
    request = greedy(model="tiny", max_tokens=64)
    async with controller(tiny, run_dir) as its:
        load = model_pb2.LoadModelRequest(
            model="tiny", options=types_pb2.LoadOptions(context_length=FIXED, pinned=True)
        )
        assert [m async for m in its.models.LoadModel(load)]
        whole = await its.stream(request)
        ids = [i for message in whole for i in message.token_ids]
        (worker,) = await its.workers()
        call = its.inference.Generate(greedy(model="tiny"))
        await anext(aiter(call))
        await kill(its)

    async with grpc.aio.insecure_channel(worker.address) as channel:
        orphan = Session(channel)
        await orphan.until(
            lambda own: ended_by(own, "CANCELLED") == 1 and own.workers[0].streams_running == 0
        )
        assert await orphan.ids() == ids[:8]

    async with controller(tiny, run_dir) as its:
        assert await its.state() == READY
        (same,) = await its.workers()
        assert (same.pid, same.incarnation) == (worker.pid, worker.incarnation)
        assert (same.context_length, same.streams_running) == (FIXED, 0)
        got = await its.models.GetModel(model_pb2.GetModelRequest(model="tiny"))
        assert got.model.pinned
        rest = greedy(model="tiny", max_tokens=64, resume_from=20, resume_token_ids=ids[:20])
        continued = await its.stream(rest)
        assert continued[0].offset == 20
        assert [i for message in continued for i in message.token_ids] == ids[20:]
        assert [i for m in await its.stream(request) for i in m.token_ids] == ids
        assert names_in(run_dir) == [".json", ".sock", "lock"]
        assert its.server is not None
        assert its.server.find_logged("adopted")["model"] == "tiny"  # the worker's own words

        os.kill(worker.pid, signal.SIGKILL)  # its end is seen, though it is no child
        assert await its.ids() == ids[:8]
        (fresh,) = await its.workers()
        assert fresh.pid != worker.pid
    assert names_in(run_dir) == []
    assert not psutil.pid_exists(fresh.pid)


@pytest.mark.asyncio
async def test_an_adopted_worker_ends_with_a_graceful_stop(tiny: Path, run_dir: Path) -> None:
    """Killed twice, adopted twice, then told to stop: nothing is left."""
    async with controller(tiny, run_dir) as its:
        before = await its.ids()
        (worker,) = await its.workers()
        await kill(its)
    async with controller(tiny, run_dir) as its:
        await kill(its)
    mark = mark_of(worker.pid)
    assert mark is not None
    async with controller(tiny, run_dir) as its:
        assert [w.pid for w in await its.workers()] == [worker.pid]
        assert await its.ids() == before
    await end_of(mark)
    assert names_in(run_dir) == []


@pytest.mark.asyncio
async def test_a_worker_with_other_options_is_not_taken_over(tiny: Path, run_dir: Path) -> None:
    """What an operator changed is in force after a restart, at the price of a load."""
    async with controller(tiny, run_dir) as its:
        before = await its.ids()
        (worker,) = await its.workers()
        mark = mark_of(worker.pid)
        assert mark is not None
        await kill(its)
    async with controller(tiny, run_dir, "--waiting-max", "7") as its:
        await end_of(mark)
        assert await its.workers() == []
        assert await its.ids() == before


@pytest.mark.asyncio
async def test_a_worker_that_hangs_when_it_is_found_is_purged(tiny: Path, run_dir: Path) -> None:
    """It answers nothing, and is killed; the model is loaded anew."""
    async with controller(tiny, run_dir) as its:
        before = await its.ids()
        (worker,) = await its.workers()
        mark = mark_of(worker.pid)
        assert mark is not None
        os.kill(worker.pid, signal.SIGSTOP)
        await kill(its)
    async with controller(tiny, run_dir) as its:
        await end_of(mark)
        assert names_in(run_dir) == ["lock"]
        assert await its.ids() == before
        (fresh,) = await its.workers()
        assert fresh.pid != worker.pid


@pytest.mark.asyncio
async def test_an_adopted_worker_that_hangs_later_is_ended(tiny: Path, run_dir: Path) -> None:
    """It is asked as any other is; a stream that waits for it goes on with the next worker."""
    request = greedy(model="tiny", max_tokens=8)
    async with controller(tiny, run_dir) as its:
        before = await its.ids()
        (worker,) = await its.workers()
        await kill(its)
    async with controller(tiny, run_dir, "--worker-silent-timeout", SILENT) as its:
        assert [w.pid for w in await its.workers()] == [worker.pid]
        os.kill(worker.pid, signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            assert [i for m in await its.stream(request) for i in m.token_ids] == before
        (fresh,) = await its.workers()
        assert fresh.pid != worker.pid


@pytest.mark.asyncio
async def test_a_worker_that_was_loading_is_purged(tiny: Path, run_dir: Path) -> None:
    """Killed during a load, the controller leaves nothing that the next one has not removed."""
    mark = await killed_while_loading(tiny, run_dir)
    async with controller(tiny, run_dir) as its:
        await end_of(mark)
        assert names_in(run_dir) == ["lock"]
        assert await its.state() != READY
        assert len(await its.ids()) == 8
        (worker,) = await its.workers()
        assert worker.pid != mark.pid
    assert names_in(run_dir) == []


@pytest.mark.asyncio
async def test_strangers_are_purged_and_nobody_else_is_touched(tiny: Path, run_dir: Path) -> None:
    """Garbage, dead and reused ids, other incarnations: the files go, and bystanders stay."""
    holding = Holding(model_digest(tiny), "tiny", str(tiny), LoadSpec(), 1.0)
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    files = [WorkerFiles(run_dir, stem) for stem in STEMS]
    (run_dir / f"{STEMS[0]}.json").write_bytes(b"\x00garbage" * 10)
    (run_dir / f"{STEMS[1]}.json").write_bytes(b" " * (1 << 20))
    (run_dir / f"{STEMS[2]}.json").symlink_to("/etc/passwd")
    files[3].write(Record(ProcessMark(gone.pid, "dead"), "i-3", holding))
    async with (
        bystander() as other,
        running_worker("--incarnation", "i-5", listen=files[5].address) as stranger,
        running_worker("--incarnation", "i-6", listen=files[6].address) as unknown,
        running_worker("--incarnation", "i-7", listen=files[7].address) as unrecorded,
    ):
        files[4].write(Record(ProcessMark(other.pid, "another start"), "i-4", holding))
        for number, worker, incarnation in ((5, stranger, "not i-5"), (6, unknown, "i-6")):
            mark = mark_of(worker.pid)
            assert mark is not None
            files[number].write(Record(mark, incarnation, holding))
        async with controller(tiny, run_dir) as its:
            assert names_in(run_dir) == ["lock"]
            for worker in (stranger, unknown, unrecorded):
                await worker.wait_ended()
            assert len(await its.ids()) == 8
    assert names_in(run_dir) == []


@pytest.mark.asyncio
async def test_a_folder_that_was_loaded_outlives_its_controller(tiny: Path, run_dir: Path) -> None:
    """Its name is remembered, so that its worker is none of a stranger; `forget` ends that."""
    options = ("--run-dir", str(run_dir / "run"), "--orphan-grace", "60s")
    own = {"MLXD_MODELS_DIR": str(run_dir / "models")}
    async with serve(*options, environment=own) as server:
        load = await mlxd("load", str(tiny), "--name", "mine", "--address", server.address)
        assert load.code == 0, load.err
        server.process.kill()
        await server.process.wait()
    async with serve(*options, environment=own) as server:
        where = ("--address", server.address)
        assert [row[0] for row in (await mlxd("ps", *where)).rows[1:]] == ["mine"]
        assert server.count("worker adopted") == 1
        assert (await mlxd("unload", "mine", *where)).code == 0
        assert (await mlxd("forget", "mine", *where)).code == 0
    async with serve(*options, environment=own) as server:
        known = await mlxd("models", "--address", server.address)
    assert [row[0] for row in known.rows[1:]] == ["demo"]


@pytest.mark.asyncio
async def test_two_controllers_never_share_a_run_directory(tiny: Path, run_dir: Path) -> None:
    """The second is refused and told by whom; the first goes on as if nothing had been."""
    async with controller(tiny, run_dir) as its:
        before = await its.ids()
        assert its.server is not None
        options = ("--address", "127.0.0.1:0", "--model", f"tiny={tiny}")
        ran = await mlxd("serve", *options, "--run-dir", str(run_dir))
        assert ran.code != 0
        assert f"another controller (process {its.server.process.pid})" in " ".join(ran.err.split())
        assert await its.ids() == before
