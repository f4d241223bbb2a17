"""What every link to a worker must do: in memory, and over gRPC to a scripted process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from mlxd.v1 import inference_pb2
from mlxd_controller.runtime.ports import Question, WorkerLink, WorkerProcess
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.wire.intake import as_checked
from mlxd_shared.wire.proof import Checked
from mlxd_shared.wire.status import RemoteError
from tests.fakes.workers import FakeWorkers
from tests.support.launching import launch

KINDS = ("fake", "gRPC")
ORDER = ("m", "/m", LoadSpec())
TIMEOUT_S = 30.0


@dataclass(slots=True)
class Pair:
    """A link and the process behind it."""

    link: WorkerLink
    process: WorkerProcess


@asynccontextmanager
async def pair(kind: str, *, endless: bool = False) -> AsyncIterator[Pair]:
    """Yield a link to a worker that streams three tokens, and then goes on for ever if told."""
    if kind == "fake":
        workers = FakeWorkers()
        workers.script.endless = endless
        process = await workers.launcher.launch(model="m", incarnation="i-1")
        yield Pair(
            workers.connect(address=process.address, incarnation="i-1", digest="d" * 64), process
        )
        return
    async with launch("serve") as real:
        link = GrpcLink(address=real.address, incarnation="i-1", digest="d" * 64)
        try:
            yield Pair(link, real)
        finally:
            await link.close()


def request(*, endless: bool = False) -> Checked:
    """Return a request for three tokens, as the scripted process reads it."""
    text = "hang 3" if endless else "count 3"
    return as_checked(inference_pb2.GenerateRequest(text=text, request_id="r"))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_load_yields_its_progress_up_to_ready(kind: str) -> None:
    """Several steps, the last one "ready"."""
    async with pair(kind) as its:
        stages = [step.stage async for step in its.link.load(*ORDER)]

    assert len(stages) > 1
    assert stages[-1] == "ready"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_is_bytes_and_then_none(kind: str) -> None:
    """Serialised messages in order, the last with a finish, then the end."""
    async with pair(kind) as its:
        stream = its.link.generate(request(), timeout_s=TIMEOUT_S)
        frames = []
        while (frame := await stream.read()) is not None:
            frames.append(inference_pb2.GenerateResponse.FromString(frame))

    assert [i for frame in frames for i in frame.token_ids] == [0, 1, 2]
    assert [frame.offset for frame in frames] == [0, 1, 2, 3]
    assert frames[-1].HasField("finish")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_a_stream_wakes_its_reader_with_an_error(kind: str) -> None:
    """The reader's task is not cancelled: it gets an error it can explain."""
    async with pair(kind, endless=True) as its:
        stream = its.link.generate(request(endless=True), timeout_s=TIMEOUT_S)
        for _ in range(3):
            assert await stream.read()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        stream.cancel()
        stream.cancel()

        with pytest.raises(RemoteError) as caught:
            await reading
    assert caught.value.code is grpc.StatusCode.CANCELLED


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_the_reader_is_a_cancellation(kind: str) -> None:
    """The reader's own cancellation goes through untouched."""
    async with pair(kind, endless=True) as its:
        stream = its.link.generate(request(endless=True), timeout_s=TIMEOUT_S)
        for _ in range(3):
            assert await stream.read()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reading.cancel()

        with pytest.raises(asyncio.CancelledError):
            await reading


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_text_goes_to_ids_and_back(kind: str) -> None:
    """Tokenize and Detokenize reach the worker."""
    async with pair(kind) as its:
        text = as_checked(inference_pb2.TokenizeRequest(text="hi"))
        raw = await its.link.ask(Question.TOKENIZE, text, timeout_s=TIMEOUT_S)
        ids = inference_pb2.TokenizeResponse.FromString(raw)
        back = as_checked(inference_pb2.DetokenizeRequest(token_ids=ids.token_ids))
        raw = await its.link.ask(Question.DETOKENIZE, back, timeout_s=TIMEOUT_S)
        assert inference_pb2.DetokenizeResponse.FromString(raw).text == "hi"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_addresses_what_goes_through(kind: str) -> None:
    """Whatever model and worker a request names, it reaches the link's own, and else unchanged."""
    other = inference_pb2.TokenizeRequest(model="m", worker_incarnation="i-0", text="hi")
    async with pair(kind) as its:
        raw = await its.link.ask(Question.TOKENIZE, as_checked(other), timeout_s=TIMEOUT_S)
    answer = inference_pb2.TokenizeResponse.FromString(raw)

    assert (answer.model_digest, bytes(answer.token_ids)) == ("d" * 64, b"hi")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_tells_its_status_and_ends_when_told(kind: str) -> None:
    """Status has the worker itself; after shutdown the process ends by itself, code 0."""
    async with pair(kind) as its:
        status = await its.link.status(timeout_s=TIMEOUT_S)
        assert [worker.pid for worker in status.workers] == [its.process.pid]

        await its.link.shutdown(timeout_s=TIMEOUT_S)
        assert await its.process.wait_exited() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_watched_worker_tells_its_status_until_it_stops(kind: str) -> None:
    """At once and again; when it has been told to end, the watch ends without an error."""
    async with pair(kind) as its, aclosing(its.link.watch(interval_s=0.1)) as statuses:
        pids = [worker.pid for _ in range(2) for worker in (await anext(statuses)).workers]
        await its.link.shutdown(timeout_s=TIMEOUT_S)
        rest = [status async for status in statuses]

    assert pids == [its.process.pid] * 2
    assert len(rest) <= 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_unloads_and_stays(kind: str) -> None:
    """Its model is gone afterwards, and it still answers."""
    async with pair(kind) as its:
        states = []
        async for _ in its.link.load(*ORDER):
            pass
        states += [w.state for w in (await its.link.status(timeout_s=TIMEOUT_S)).workers]
        await its.link.unload(timeout_s=TIMEOUT_S)
        states += [w.state for w in (await its.link.status(timeout_s=TIMEOUT_S)).workers]

    assert states == [ModelState.READY, ModelState.UNLOADED]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_follows_another_controller_or_says_why_not(kind: str) -> None:
    """What it takes is answered with nothing; its own refusal comes as the error that it is."""
    async with pair(kind) as its:
        await its.link.adopt(ProcessMark(7, "boot:1"), output_path="", timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidRequest):
            await its.link.adopt(ProcessMark(0, ""), output_path="", timeout_s=TIMEOUT_S)
        assert its.process.exit_code is None


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_shrinks_to_a_target(kind: str) -> None:
    """It tells what it held before and holds after; what streams need it keeps."""
    async with pair(kind) as its:
        assert await its.link.shrink(700, timeout_s=TIMEOUT_S) == (1000, 700)
    async with pair(kind) as its:
        assert await its.link.shrink(0, timeout_s=TIMEOUT_S) == (1000, 600)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_dead_worker_is_unavailable(kind: str) -> None:
    """Every call to a process that has ended fails with UNAVAILABLE."""
    async with pair(kind) as its:
        await its.process.close()

        with pytest.raises(RemoteError) as caught:
            await its.link.generate(request(), timeout_s=TIMEOUT_S).read()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(RemoteError) as caught:
            await its.link.status(timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_link_let_go_of_is_unavailable(kind: str) -> None:
    """What comes after close() is an error like that of a worker that has gone, and no bug."""
    async with pair(kind) as its:
        await its.link.close()
        await its.link.close()

        with pytest.raises(RemoteError) as caught:
            its.link.generate(request(), timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(RemoteError) as caught:
            await its.link.status(timeout_s=TIMEOUT_S)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
