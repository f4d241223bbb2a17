"""The door to MLX: bounded, never waited for by the status, and loud when it breaks."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import (
    BackendProblem,
    InternalError,
    InvalidModel,
    LoadAbandoned,
    QueueFull,
    ShuttingDown,
)
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from mlxd_worker.engine.request import Cancel, Event, Failed, Finished, Sink, StreamId, Submit
from mlxd_worker.thread.engine_thread import EngineThread
from mlxd_worker.thread.facts import Figures, Loaded, LoadJob, Report
from mlxd_worker.thread.host import ModelHost
from tests.support.engine_threads import Started, figures_now, kind, running_engine
from tests.support.engines import GREEDY, Collected
from tests.support.tiny_model import write_tiny_model


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    """A running engine thread, stopped at the end."""
    async with running_engine() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def stream(number: int, sink: Sink, *, max_tokens: int = 5) -> Submit:
    """Return a short stream."""
    return Submit(
        stream=StreamId(number),
        prompt=(5, 6, 7),
        sampling=GREEDY,
        max_tokens=max_tokens,
        stop=(),
        stop_token_ids=frozenset(),
        eos_ids=frozenset(),
        skip_special_tokens=True,
        submitted_s=0.0,
        sink=sink,
    )


@pytest.mark.asyncio
async def test_a_stream_crosses_both_ways(started: Started, folder: Path) -> None:
    """What is submitted here comes back here, in order and with its end."""
    await started.load(folder)
    reader = started.engine.reader()
    started.engine.submit(stream(1, reader))

    ids: list[int] = []
    while len(ids) < 5:
        ids += (await reader.next()).ids
    assert len(ids) == 5


@pytest.mark.asyncio
async def test_figures_never_wait_for_a_step(started: Started, folder: Path) -> None:
    """While the thread is busy the last figures are returned as they were; afterwards new ones."""
    await started.load(folder)
    before = await figures_now(started.engine)
    async with started.hold():
        during = await started.engine.figures()
        assert (await started.engine.figures()).at_s == during.at_s
    await started.engine.ready()
    assert (await figures_now(started.engine)).at_s > during.at_s
    assert before.mlx_active_nbytes >= sum(account.nbytes for account in before.accounts) > 0


class _Tardy(ModelHost):
    """Settles late after a load, as a thread does that gets no processor."""

    gate = threading.Event()

    def load(self, job: LoadJob, report: Report) -> Loaded:
        """Load, and do not settle soon."""
        self.gate.clear()
        return super().load(job, report)

    def settle(self) -> Figures:
        """Settle once that is wanted."""
        self.gate.wait()
        return super().settle()


@pytest.mark.asyncio
async def test_figures_tell_of_every_command_that_was_answered(folder: Path) -> None:
    """Even where the thread comes to nothing else between its answer and the question."""
    _Tardy.gate.set()
    engine = EngineThread(
        device=kind(),
        loop=asyncio.get_running_loop(),
        on_fault=lambda: None,
        make_host=lambda _: _Tardy(device=kind()),
    )
    engine.start()
    try:
        await Started(engine).load(folder)
        assert sum(account.nbytes for account in (await engine.figures()).accounts) > 0
    finally:
        _Tardy.gate.set()
        await engine.stop()


@pytest.mark.asyncio
async def test_why_there_is_no_host_reaches_who_waits_for_it() -> None:
    """An error that mlxd expects is no bug of the engine's: it arrives as itself."""

    def refuse(_: DeviceKind) -> ModelHost:
        raise BackendProblem("no ranks here")

    failed = asyncio.Event()
    engine = EngineThread(
        device=kind(),
        loop=asyncio.get_running_loop(),
        on_fault=failed.set,
        make_host=refuse,
    )
    ready = asyncio.ensure_future(engine.ready())
    await asyncio.sleep(0)  # it asks before the thread begins
    engine.start()
    with pytest.raises(BackendProblem, match="no ranks here"):
        await ready
    await failed.wait()
    await engine.stop()


class _Stepping(ModelHost):
    """Has some steps to do once a stream has come, and notes at which it was asked for figures."""

    def __init__(self, at_s: float) -> None:
        super().__init__(device=kind())
        self._at_s = at_s
        self.left = 0
        self.taken: list[int] = []
        self.done = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether steps are left."""
        return self.left > 0

    def submit(self, request: Submit) -> None:
        """Do as many steps as the stream is to have tokens."""
        self.left = request.max_tokens or 0

    def step(self) -> None:
        """Do one."""
        self.left -= 1
        if not self.left:
            self.done.set()

    def settle(self) -> Figures:
        """Look at nothing."""
        return self.figures()

    def figures(self) -> Figures:
        """Return figures as old as a test says."""
        self.taken.append(self.left)
        return Figures(at_s=self._at_s)


@pytest.mark.asyncio
@pytest.mark.parametrize(("at_s", "steps_left"), [(math.inf, []), (-math.inf, [4, 3, 2, 1])])
async def test_figures_are_taken_between_steps_where_they_are_old(
    at_s: float, steps_left: list[int]
) -> None:
    """They cost a step some of its time, so new ones stay a while."""
    made: list[_Stepping] = []

    def make(_: object) -> _Stepping:
        made.append(_Stepping(at_s))
        return made[0]

    engine = EngineThread(
        device=kind(), loop=asyncio.get_running_loop(), on_fault=lambda: None, make_host=make
    )
    engine.start()
    try:
        await engine.ready()
        (host,) = made
        engine.submit(stream(1, Collected(), max_tokens=5))
        await asyncio.to_thread(host.done.wait)
    finally:
        await engine.stop()
    assert [left for left in host.taken if left] == steps_left


@pytest.mark.asyncio
async def test_the_mailbox_is_bounded_for_streams_alone(started: Started, folder: Path) -> None:
    """A full mailbox refuses streams by name; cancels and commands still pass."""
    await started.load(folder)
    async with started.hold():
        sinks = [Collected() for _ in range(config.ENGINE_MAILBOX_MAX)]
        for number, sink in enumerate(sinks):
            started.engine.submit(stream(number, sink, max_tokens=1))
        with pytest.raises(QueueFull) as caught:
            started.engine.submit(stream(-1, Collected()))
        assert caught.value.limit == config.ENGINE_MAILBOX_MAX
        started.engine.cancel(Cancel(StreamId(0)))
    await started.engine.end_streams(ShuttingDown())
    assert sinks[0].events == []


@pytest.mark.asyncio
async def test_a_load_can_be_given_up(started: Started, folder: Path) -> None:
    """An abandoned load ends at its next step and holds nothing; the next one succeeds."""
    before_nbytes = (await figures_now(started.engine)).mlx_active_nbytes  # of whatever ran before
    async with started.hold():
        task = asyncio.ensure_future(started.load(folder))
        await asyncio.sleep(0)
        started.engine.abandon_load()
    with pytest.raises(LoadAbandoned):
        await task
    assert (await figures_now(started.engine)).mlx_active_nbytes < before_nbytes + 1024

    await started.load(folder)
    assert (await figures_now(started.engine)).mlx_active_nbytes > 1024


@pytest.mark.asyncio
async def test_progress_comes_in_order(started: Started, folder: Path) -> None:
    """Stages follow one another, bytes grow, and "ready" is the last."""
    seen: list[LoadProgress] = []
    await started.engine.load(LoadJob(folder, "tiny", "", LoadSpec()), seen.append)
    await asyncio.sleep(0)

    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["starting", "reading weights", "warming up", "ready"]
    assert seen[-1].bytes_read == seen[-1].bytes_total


@pytest.mark.asyncio
async def test_a_failed_load_keeps_its_traceback_and_no_arrays(
    started: Started, tmp_path: Path
) -> None:
    """The error says where it was raised; the frames behind it hold no memory."""
    folder = write_tiny_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    before_nbytes = (await figures_now(started.engine)).mlx_active_nbytes  # of whatever ran before
    with pytest.raises(InvalidModel) as caught:
        await started.load(folder)

    assert any(entry.name == "load_tokenizer" for entry in caught.traceback)
    assert (await figures_now(started.engine)).mlx_active_nbytes < before_nbytes + 1024
    assert started.faults == []


class _BreaksOnce(Collected):
    """A sink that breaks its contract at the first event."""

    def put(self, event: Event) -> None:
        """Fail the first time."""
        first = not self.events
        self.events.append(event)
        if first:
            raise OSError("broken sink")


@pytest.mark.asyncio
async def test_a_fault_of_the_loop_ends_everything_loudly(started: Started, folder: Path) -> None:
    """Every stream is told, the process is told once, and nobody waits for an answer in vain."""
    await started.load(folder)
    figures = await started.engine.figures()
    other = Collected()
    async with started.hold():
        started.engine.submit(stream(1, other, max_tokens=400))
        started.engine.submit(stream(2, _BreaksOnce()))
        late = asyncio.ensure_future(started.engine.shrink(0))
        await asyncio.sleep(0)
    await started.faulted.wait()

    event = other.events[-1]
    assert isinstance(event, Failed)
    assert isinstance(event.error, InternalError)
    await asyncio.wait([late])
    with pytest.raises(ShuttingDown):
        started.engine.submit(stream(3, Collected()))
    with pytest.raises(ShuttingDown):
        await started.load(folder)
    assert (await started.engine.figures()).at_s >= figures.at_s
    assert started.faults == [1]


@pytest.mark.asyncio
async def test_a_command_that_fails_half_way_ends_the_thread(
    started: Started, folder: Path
) -> None:
    """What fails while memory is given back leaves the caches unknown: no stream goes on."""
    await started.load(folder)
    running = Collected()

    def fail(_: object) -> None:
        raise RuntimeError("no memory left to copy out")

    started.engine.submit(stream(1, running, max_tokens=400))
    with pytest.raises(RuntimeError, match="no memory"):
        await started.engine._call(fail)
    await started.faulted.wait()

    assert isinstance(running.events[-1], Failed)
    with pytest.raises(ShuttingDown):
        await started.engine.shrink(0)
    assert started.faults == [1]


@pytest.mark.asyncio
async def test_stopping_answers_everybody(started: Started, folder: Path) -> None:
    """Streams and calls behind the stop are refused, not forgotten."""
    await started.load(folder)
    sink = Collected()
    async with started.hold():
        stop = asyncio.ensure_future(started.engine.stop())
        await asyncio.sleep(0)
        started.engine.submit(stream(1, sink))
        call = asyncio.ensure_future(started.engine.shrink(0))
        await asyncio.sleep(0)
    await stop
    with pytest.raises(ShuttingDown):
        await call

    (event,) = sink.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, ShuttingDown)
    assert started.faults == []


@pytest.mark.asyncio
@pytest.mark.parametrize("rest_s", [0.0, 0.05, 3600.0])
async def test_an_idle_thread_gives_spare_memory_back(folder: Path, rest_s: float) -> None:
    """Arenas that are kept for streams to come go once none has come for so long, not before, and
    however often somebody asks for figures meanwhile.
    """
    loop = asyncio.get_running_loop()
    engine = EngineThread(device=kind(), loop=loop, on_fault=lambda: None, rest_s=rest_s)
    engine.start()
    await Started(engine).load(folder)
    reader = engine.reader()
    engine.submit(stream(1, reader))
    while not isinstance(await reader.next(), Finished):
        pass

    lasts = rest_s > 1.0
    seen_nbytes = [await _kv_nbytes(engine) for _ in range(3)]
    while not lasts and seen_nbytes[-1]:
        seen_nbytes.append(await _kv_nbytes(engine))
    assert not lasts or min(seen_nbytes) > 0
    await engine.stop()


async def _kv_nbytes(engine: EngineThread) -> int:
    return next(a.nbytes for a in (await figures_now(engine)).accounts if a.name == "kv")
