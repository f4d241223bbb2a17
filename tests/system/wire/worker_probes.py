"""Probes of what only a worker's controller sends, straight to a real worker process.

`Wire.model` is the name to load under and `Wire.folder` the model; the worker begins empty.
"""

from __future__ import annotations

import os
from typing import Any

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, status_pb2, types_pb2, worker_pb2
from mlxd_shared.domain.errors import (
    FieldNotServed,
    InvalidRequest,
    ModelDraining,
    ModelNotFound,
    WrongWorker,
)
from mlxd_shared.ops.known_process import mark_of
from tests.system.wire.probe import Probes, Wire, begins, read, refusal
from tests.system.wire.scenario import until_waiting

NO_PID = (1 << 22) + 1
"""Above what systems give at most."""
HELD_TOKENS = 8192
"""A context that a stream fills in far longer than a check needs."""
PROBES = Probes()
covering = PROBES.covering


async def incarnation(wire: Wire) -> str:
    """Return the worker's own name for itself."""
    got = await wire.status.GetStatus(status_pb2.GetStatusRequest())
    return wire.recorder.see(got).status.workers[0].incarnation


async def load(wire: Wire, request: worker_pb2.LoadRequest) -> list[worker_pb2.LoadResponse]:
    """Return every message of a load."""
    return [wire.recorder.see(message) async for message in wire.worker.Load(request)]


@covering(
    "LoadRequest.worker_incarnation",
    "LoadRequest.path",
    "LoadRequest.name",
    "LoadRequest.digest",
    "LoadRequest.options",
)
async def load_follows_its_orders(wire: Wire) -> None:
    """Only for its own incarnation does a worker load, and then what it was told, by that name."""
    request = worker_pb2.LoadRequest(
        worker_incarnation="another",
        path=str(wire.folder),
        name=wire.model,
        digest="d" * 64,
        options=types_pb2.LoadOptions(
            context_length=HELD_TOKENS,
            rows_max=2,
            kv_format=types_pb2.KV_FORMAT_Q8,
            prefix_cache_bytes=3 << 20,
        ),
    )
    assert isinstance(await refusal(load(wire, request)), WrongWorker)
    request.worker_incarnation = await incarnation(wire)
    request.options.ranks = 2  # this worker is one process
    assert isinstance(await refusal(load(wire, request)), InvalidRequest)
    request.options.ranks = 1
    messages = await load(wire, request)
    assert messages[-1].progress.stage == "ready"
    assert messages[-1].progress.bytes_read == messages[-1].progress.bytes_total > 0
    got = await wire.status.GetStatus(status_pb2.GetStatusRequest())
    (worker,) = wire.recorder.see(got).status.workers
    assert (worker.model_name, worker.model_digest) == (wire.model, "d" * 64)
    assert (worker.context_length, worker.rows_max) == (HELD_TOKENS, 2)
    assert worker.model_path == str(wire.folder)
    assert (worker.kv_format, worker.prefix_cache_bytes) == (types_pb2.KV_FORMAT_Q8, 3 << 20)


@covering("GenerateRequest.worker_incarnation", "GenerateRequest.load_duration")
async def the_controllers_fields_are_honoured(wire: Wire) -> None:
    """Another's incarnation is refused; the load's duration comes back in the usage."""
    assert isinstance(await refusal(wire.generate(worker_incarnation="x")), WrongWorker)
    messages = await wire.generate(
        worker_incarnation=await incarnation(wire), load_duration=Duration(seconds=3)
    )
    assert messages[-1].usage.load_duration.seconds == 3


@covering("GenerateRequest.choice")
async def a_choice_is_named_in_its_messages(wire: Wire) -> None:
    """The prompt is counted with the first one alone; several at once are the controller's."""
    messages = await wire.generate(choice=2)
    assert {message.choice for message in messages} == {2}
    assert messages[-1].usage.prompt_tokens == 0
    error = await refusal(wire.generate(n=2))
    assert isinstance(error, FieldNotServed)


@covering("GenerateRequest.age")
async def the_older_is_served_first(wire: Wire) -> None:
    """Of streams that wait behind those that have rows, the one goes first that came first."""
    endless: dict[str, Any] = {"text": "Once", "ignore_eos": True}
    endless["worker_incarnation"] = await incarnation(wire)
    calls = {
        age_s: wire.inference.Generate(
            inference_pb2.GenerateRequest(age=Duration(seconds=age_s), **endless)
        )
        for age_s in (90, 80)
    }
    for call in calls.values():
        await begins(call)
    for age_s in (0, 10, 20):
        request = inference_pb2.GenerateRequest(age=Duration(seconds=age_s), **endless)
        calls[age_s] = wire.inference.Generate(request)
    await until_waiting(wire, 3)
    for waiting, gone, age_s in ((2, 90, 20), (1, 80, 10), (0, 20, 0)):
        calls[gone].cancel()
        await begins(calls[age_s])
        await until_waiting(wire, waiting)
    calls[10].cancel()
    calls[0].cancel()


@covering("TokenizeRequest.worker_incarnation", "DetokenizeRequest.worker_incarnation")
async def tokenize_for_its_own_incarnation(wire: Wire) -> None:
    """Another's incarnation is refused, its own is served."""
    mine = await incarnation(wire)
    request = inference_pb2.TokenizeRequest(text="The king", worker_incarnation=mine)
    ids = list((await wire.inference.Tokenize(request)).token_ids)
    back = inference_pb2.DetokenizeRequest(token_ids=ids, worker_incarnation=mine)
    assert (await wire.inference.Detokenize(back)).text.strip() == "The king"
    request.worker_incarnation = back.worker_incarnation = "x"
    assert isinstance(await refusal(wire.inference.Tokenize(request)), WrongWorker)
    assert isinstance(await refusal(wire.inference.Detokenize(back)), WrongWorker)


@covering("ShrinkRequest.worker_incarnation", "ShrinkRequest.target_bytes")
async def shrink_empties_the_pool_down_to_a_target(wire: Wire) -> None:
    """A target above what is held changes nothing; target 0 gives the pool back."""
    await wire.generate()
    mine = await incarnation(wire)
    idle = worker_pb2.ShrinkRequest(worker_incarnation=mine, target_bytes=1 << 50)
    kept = wire.recorder.see(await wire.worker.Shrink(idle))
    assert kept.bytes_after == kept.bytes_before > 0
    hard = worker_pb2.ShrinkRequest(worker_incarnation=mine, target_bytes=0)
    shrunk = wire.recorder.see(await wire.worker.Shrink(hard))
    assert shrunk.bytes_after <= shrunk.bytes_before
    hard.worker_incarnation = "x"
    assert isinstance(await refusal(wire.worker.Shrink(hard)), WrongWorker)


@covering("ShrinkRequest.prefix_disk_bytes")
async def a_share_of_the_disk_is_bounded(wire: Wire) -> None:
    """A worker that keeps nothing there takes a share for good; one beyond the limit is refused."""
    mine = await incarnation(wire)
    request = worker_pb2.ShrinkRequest(
        worker_incarnation=mine, target_bytes=(1 << 64) - 1, prefix_disk_bytes=1 << 50
    )
    kept = wire.recorder.see(await wire.worker.Shrink(request))
    assert kept.bytes_after == kept.bytes_before
    request.prefix_disk_bytes += 1
    error = await refusal(wire.worker.Shrink(request))
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == ["prefix_disk_bytes"]


@covering("UnloadRequest.worker_incarnation")
async def unload_and_load_again(wire: Wire) -> None:
    """After an unload nothing is served and next to nothing held; a load brings it back."""
    mine = await incarnation(wire)
    wrong = worker_pb2.UnloadRequest(worker_incarnation="x")
    assert isinstance(await refusal(wire.worker.Unload(wrong)), WrongWorker)
    request = worker_pb2.UnloadRequest(worker_incarnation=mine)
    answer = wire.recorder.see(await wire.worker.Unload(request))
    assert answer.mlx_active_bytes < 64 << 10
    assert isinstance(await refusal(wire.generate()), ModelNotFound)
    await load(
        wire,
        worker_pb2.LoadRequest(
            worker_incarnation=mine, path=str(wire.folder), name=wire.model, digest="d" * 64
        ),
    )


@covering("DrainRequest.worker_incarnation", "DrainRequest.grace")
async def drain_waits_its_grace_and_takes_no_more(wire: Wire) -> None:
    """A stream that outlasts the grace is counted; new ones are refused."""
    mine = await incarnation(wire)
    wrong = worker_pb2.DrainRequest(worker_incarnation="x")
    assert isinstance(await refusal(wire.worker.Drain(wrong)), WrongWorker)
    endless = inference_pb2.GenerateRequest(text="Once", ignore_eos=True, num_predict=0)
    call = wire.inference.Generate(endless)
    await read(call)
    request = worker_pb2.DrainRequest(worker_incarnation=mine, grace=Duration(nanos=1_000_000))
    answer = wire.recorder.see(await wire.worker.Drain(request))
    assert answer.streams_left == 1
    assert isinstance(await refusal(wire.generate()), ModelDraining)
    call.cancel()
    request.grace.FromSeconds(30)
    assert (await wire.worker.Drain(request)).streams_left == 0


@covering(
    "AdoptRequest.worker_incarnation",
    "AdoptRequest.controller_pid",
    "AdoptRequest.controller_start",
    "AdoptRequest.output_path",
)
async def adopt_is_for_a_controller_and_its_pipe(wire: Wire) -> None:
    """Another's incarnation, a process that is not meant and a pipe that is none are refused.

    So is all else here, where the controller lives; tests/worker/process/test_adoption.py goes on.
    """
    mine = mark_of(os.getpid())
    assert mine is not None
    good = worker_pb2.AdoptRequest(
        worker_incarnation=await incarnation(wire),
        controller_pid=mine.pid,
        controller_start=mine.start,
    )

    async def violation(**wrong: Any) -> str:
        request = worker_pb2.AdoptRequest()
        request.CopyFrom(good)
        request.MergeFrom(worker_pb2.AdoptRequest(**wrong))
        error = await refusal(wire.worker.Adopt(request))
        assert isinstance(error, InvalidRequest)
        return error.describe()

    wrong = worker_pb2.AdoptRequest(worker_incarnation="x")
    assert isinstance(await refusal(wire.worker.Adopt(wrong)), WrongWorker)
    assert "is not the one that is meant" in await violation(controller_pid=NO_PID)
    assert "is not the one that is meant" in await violation(controller_start="x")
    assert "output_path" in await violation(output_path=str(wire.folder))
    assert "lives" in await violation()


@covering("ShutdownRequest.worker_incarnation")
async def shutdown_ends_the_right_process(wire: Wire) -> None:
    """Another's incarnation is refused; its own ends the server."""
    wrong = worker_pb2.ShutdownRequest(worker_incarnation="x")
    assert isinstance(await refusal(wire.worker.Shutdown(wrong)), WrongWorker)
    request = worker_pb2.ShutdownRequest(worker_incarnation=await incarnation(wire))
    await wire.worker.Shutdown(request)
