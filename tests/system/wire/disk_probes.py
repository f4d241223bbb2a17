"""Probes of what is kept on disk of prompts, through a controller with a folder for them."""

from __future__ import annotations

import asyncio

from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.support.cli import LIMIT_S
from tests.system.wire.model_probes import unload
from tests.system.wire.probe import LONG, Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering
PROMPT = inference_pb2.TokenIds(ids=[5 + number % 50 for number in range(600)])


async def status(wire: Wire) -> status_pb2.Status:
    """Return the status."""
    request = status_pb2.GetStatusRequest()
    return wire.recorder.see(await wire.status.GetStatus(request)).status


async def drop(
    wire: Wire, request: model_pb2.DropPrefixesRequest
) -> model_pb2.DropPrefixesResponse:
    """Drop what the request says."""
    return wire.recorder.see(await wire.models.DropPrefixes(request))


async def write_and_read(wire: Wire) -> None:
    """Have a prompt's beginning written to disk, and read after an unload."""
    while True:
        for _ in range(2):
            await wire.generate(model=LONG, tokens=PROMPT, max_tokens=1)
        (disk,) = [
            worker.prefix_disk
            for worker in (await status(wire)).workers
            if worker.model_name == LONG and not worker.HasField("exit_code")
        ]
        if disk.read:
            return
        if disk.written:
            await unload(wire, LONG)


@covering("DropPrefixesRequest.model", "DropPrefixesRequest.all")
async def prompts_on_disk_are_checked_and_dropped(wire: Wire) -> None:
    """What is there is accounted for by model, sound, and gone once it is dropped."""
    async with asyncio.timeout(LIMIT_S):
        await write_and_read(wire)
    await unload(wire, LONG)
    async with asyncio.timeout(LIMIT_S):
        while not any(one.model == LONG and not one.in_use for one in await folders(wire)):
            pass
    checked = wire.models.VerifyPrefixes(model_pb2.VerifyPrefixesRequest())
    findings = [wire.recorder.see(message) async for message in checked]
    sound = {one.model: one.sound for one in findings}
    assert sound[LONG] > 0
    dropped = await drop(wire, model_pb2.DropPrefixesRequest(model=LONG))
    assert dropped.blocks == sound[LONG]
    assert (await drop(wire, model_pb2.DropPrefixesRequest(model=LONG))).blocks == 0
    await drop(wire, model_pb2.DropPrefixesRequest(all=True))
    assert [one for one in await folders(wire) if one.blocks] == []
    for request in (
        model_pb2.DropPrefixesRequest(),
        model_pb2.DropPrefixesRequest(model=LONG, all=True),
    ):
        assert isinstance(await refusal(wire.models.DropPrefixes(request)), InvalidRequest)


async def folders(wire: Wire) -> list[status_pb2.PrefixFolder]:
    """Return the accounts of what is on disk."""
    return list((await status(wire)).prefix_store.folders)
