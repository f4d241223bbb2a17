"""Every field of every message is exercised on real processes, or refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.domain.errors import FieldNotServed
from mlxd_shared.security.net import CHANNEL_OPTIONS
from tests.support import hub_server
from tests.support.chat_template import write_bare_demo, write_template
from tests.support.disk_keys import write_key
from tests.support.hub_server import FakeHub, Repository
from tests.support.made_stores import commit_of
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import running_worker
from tests.system.wire import (
    answer_probes,
    chat_probes,
    disk_probes,
    embed_probes,
    format_probes,
    generate_probes,
    model_probes,
    scenario,
    score_probes,
    worker_probes,
)
from tests.system.wire.model_probes import ON_HUB, load, unload
from tests.system.wire.probe import LONG, Wire, refusal
from tests.system.wire.walk import Recorder, request_fields, response_fields

CONTEXT = 256
"""A quarter of the demo model's, so that streams to its end take a quarter as long."""
LONG_CONTEXT = 16384
ALL_S_MAX = 600
"""For all probes, one after another."""
CONTROLLER_PROBES = [
    *generate_probes.PROBES.all,
    *answer_probes.PROBES.all,
    *format_probes.PROBES.all,
    *chat_probes.PROBES.all,
    *embed_probes.PROBES.all,
    *score_probes.PROBES.all,
    *model_probes.PROBES.all,
    *disk_probes.PROBES.all,
]
WORKER_PROBES = worker_probes.PROBES.all

BARE = types_pb2.LoadOptions(prefix_cache_bytes=0)
# The fields that a server refuses by name, by their messages.
UNSERVED = {
    "mlxd.v1.LoadModelRequest": ("cancel_on_disconnect",),
    "mlxd.v1.ContentPart": ("image",),
}
# Fields of answers that no server fills yet, each because of what is refused by name.
SILENT: dict[str, str] = {}
# Fields whose honest value is 0 here: nothing leaks, no memory is short, and on CPU nothing is
# compiled or switched off; a CPU has no driver's id, and the one machine no name and is not lost.
# tests/controller/services/test_devices.py has them set. No reader of a log is slow, as one is in
# tests/controller/services/test_logs.py. No file on disk is damaged or had to make room, as in
# tests/controller/prefixes/test_keeper.py, or has another key, as in test_keys.py there. The model
# sees no images, as one of tests/system/test_images.py does. Nothing is divided over ranks, as in
# tests/system/test_ranks.py.
ZERO = {
    "mlxd.v1.Model.has_vision",
    "mlxd.v1.Model.machine",
    "mlxd.v1.PrefixDisk.evicted",
    "mlxd.v1.PrefixDisk.refused",
    "mlxd.v1.RankMemory.device",
    "mlxd.v1.RankMemory.mlx_active_bytes",
    "mlxd.v1.RankMemory.mlx_cache_bytes",
    "mlxd.v1.RankMemory.mlx_peak_bytes",
    "mlxd.v1.RankMemory.pid",
    "mlxd.v1.RankMemory.resident_bytes",
    "mlxd.v1.VerifyPrefixesResponse.removed",
    "mlxd.v1.VerifyPrefixesResponse.unread",
    "mlxd.v1.VerifyPrefixesResponse.locked",
    "mlxd.v1.WorkerMemory.ranks",
    "mlxd.v1.WorkerMemory.unaccounted_bytes",
    "mlxd.v1.UnloadResponse.mlx_active_bytes",
    "mlxd.v1.WorkerStatus.compiles",
    "mlxd.v1.WorkerStatus.fast_paths_off",
    "mlxd.v1.DeviceStatus.lost",
    "mlxd.v1.DeviceStatus.machine",
    "mlxd.v1.DeviceStatus.models_max",
    "mlxd.v1.DeviceStatus.pressed",
    "mlxd.v1.DeviceStatus.id",
    "mlxd.v1.DeviceStatus.product",
    "mlxd.v1.HostMemory.lost",
    "mlxd.v1.ReadLogsResponse.missed_lines",
}


def unserved_fields() -> set[str]:
    """Return the full name of every field that is refused by name."""
    return {f"{message}.{name}" for message, names in UNSERVED.items() for name in names}


@asynccontextmanager
async def controller(
    model: str, folder: Path, *options: str, **environment: str
) -> AsyncIterator[Wire]:
    """A real controller that offers `folder` as `model`."""
    async with (
        serve("--model", f"{model}={folder}", *options, environment=environment) as server,
        grpc.aio.insecure_channel(server.address, options=list(CHANNEL_OPTIONS)) as channel,
    ):
        yield Wire(channel, Recorder(), model, folder)


def write_demo(folder: Path, context: int) -> Path:
    """Write the demo model with another context, and without its chat template."""
    write_bare_demo(folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class Scene:
    """A controller that both tests use, and what a fresh one had to say."""

    wire: Wire
    alone_bytes: int
    """What the model needs, as reckoned before anything was loaded."""


@pytest.fixture(name="demo", scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a shorter context."""
    return write_demo(tmp_path_factory.mktemp("models") / "demo", CONTEXT)


@pytest_asyncio.fixture(name="scene", loop_scope="module", scope="module")
async def made_scene(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """The demo model, one with a chat template, and one whose streams do not end soon."""
    folder = tmp_path_factory.mktemp("models")
    other = write_template(write_tiny_model(folder / "other"))
    long = write_tiny_model(folder / LONG, context_max=LONG_CONTEXT)
    kept = (
        *("--prefix-disk", "64M", "--prefix-disk-folder", str(folder / "prefixes")),
        *("--prefix-disk-key", str(write_key(folder / "key"))),
    )
    more = ("--model", f"other={other}", "--model", f"{LONG}={long}", *kept)
    (folder / "hub").mkdir()
    files = {path.name: path.read_bytes() for path in write_tiny_model(folder / "p").iterdir()}
    repository = Repository(commit_of("1"), files | {"README.md": b"# pulled"})
    with hub_server.serving(FakeHub({ON_HUB: repository})) as hub:
        where = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
        cache = ("--hub-cache", str(folder / "hub"))
        async with controller("demo", demo, *more, *cache, **where) as wire:
            asking = model_pb2.LoadModelRequest(model="demo", validate_only=True, options=BARE)
            (alone,) = await load(wire, asking)
            yield Scene(wire, alone.fit.need_bytes)


def test_every_request_field_is_probed_or_refused() -> None:
    """No field that a client can send is without a probe or a refusal, and none has both."""
    probed = {name for probe in [*CONTROLLER_PROBES, *WORKER_PROBES] for name in probe.covers}
    refused = unserved_fields()
    assert not probed & refused
    assert request_fields() == probed | refused


def _some_value(field: Any) -> Any:
    """Return a value in range that asks for something."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"x"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return 0.25
    return 3


def _set(message: Message, field: Any) -> None:
    """Set `field` of `message` to something that asks for something."""
    if field.message_type is not None:
        getattr(message, field.name).SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).append(_some_value(field))
    else:
        setattr(message, field.name, _some_value(field))


@pytest.mark.asyncio(loop_scope="module")
async def test_each_unserved_field_is_refused_by_name(scene: Scene) -> None:
    """UNIMPLEMENTED with the field's path, for every field on the list, from a real server."""
    wire = scene.wire
    for message, names in UNSERVED.items():
        for name in names:
            error = await _refusal_of(wire, message, name)
            assert isinstance(error, FieldNotServed), (message, name, error)
            assert error.field.split(".")[-1] == name
    assert len(await wire.ids()) == 12, "the next good request is served"


async def _refusal_of(wire: Wire, message: str, name: str) -> Exception:
    """Send a request in which only the unserved field is out of the ordinary."""
    generate = inference_pb2.GenerateRequest(model=wire.model, text="Once", max_tokens=1)
    loading = model_pb2.LoadModelRequest(model=wire.model)
    holders: dict[str, Message] = {
        "mlxd.v1.GenerateRequest": generate,
        "mlxd.v1.LoadOptions": loading.options,
        "mlxd.v1.LoadModelRequest": loading,
    }
    if message == "mlxd.v1.ContentPart":  # which makes a chat of the text
        holders[message] = generate.chat.messages.add(role="user").parts.add()
    holder = holders[message]
    _set(holder, holder.DESCRIPTOR.fields_by_name[name])
    if message in ("mlxd.v1.LoadOptions", "mlxd.v1.LoadModelRequest"):
        return await refusal(load(wire, loading))
    return await refusal(wire.generate(generate))


@pytest.mark.timeout(ALL_S_MAX)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_field_works_on_real_processes(
    scene: Scene, demo: Path, tmp_path: Path
) -> None:
    """Each probe holds, and every field of an answer was set by some real answer."""
    wire = scene.wire
    for probe in CONTROLLER_PROBES:
        await probe.check(wire)
    await unload(wire, chat_probes.MODEL)
    await scenario.two_names_share_a_worker(wire)
    await scenario.streams_queue(wire)
    await scenario.a_worker_dies(wire)
    seen = set(wire.recorder.seen)
    async with running_worker() as worker:
        long = write_demo(tmp_path / "long", LONG_CONTEXT)
        alone = Wire(worker.channel, Recorder(), "demo", long)
        for probe in WORKER_PROBES:
            await probe.check(alone)
        seen |= alone.recorder.seen
    seen |= await _a_tight_budget(demo, scene.alone_bytes, tmp_path)
    expected = response_fields() - set(SILENT) - ZERO - unserved_fields()
    assert expected - seen == set()


async def _a_tight_budget(demo: Path, alone_bytes: int, tmp_path: Path) -> set[str]:
    """Room for one model of two: the report names who would go, and what would make it fit."""
    tiny = write_tiny_model(tmp_path / "tiny")
    limit = str(alone_bytes + (1 << 20))
    budget = ("--memory-limit", limit, "--reserve", "0", "--model", f"tiny={tiny}")
    async with controller("demo", demo, *budget) as wire:
        await load(wire, model_pb2.LoadModelRequest(model="tiny", options=BARE))
        request = model_pb2.LoadModelRequest(model="demo", validate_only=True)
        (crowded,) = await load(wire, request)
        assert list(crowded.fit.would_evict) == ["tiny"]
        assert (crowded.fit.fits_now, crowded.fit.fits_ever) == (False, True)
        request.options.CopyFrom(types_pb2.LoadOptions(rows_max=64, context_length=CONTEXT))
        (hopeless,) = await load(wire, request)
        assert not hopeless.fit.fits_ever
        assert hopeless.fit.suggestions
        return wire.recorder.seen
