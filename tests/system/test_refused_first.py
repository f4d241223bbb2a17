"""A model that no worker can load is refused before anybody makes room for it, by file and key.

The machine is full with another model, which the scheduler would evict for one that can be loaded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd import Client, Delta, SamplingOptions
from mlxd_shared.domain.errors import InvalidModel
from tests.support.cli import mlxd
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model

FULL = ("--max-loaded", "1")
CONTEXT = 16_384
"""Long enough that a stream goes on for as long as a test needs it to."""
GREEDY = SamplingOptions(temperature=0.0)


def edit(**values: Any) -> Callable[[Path], None]:
    """Return a change of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def garble(folder: Path) -> None:
    """Give a model a chat template that is no text."""
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "nobodys": (edit(architectures=["FooForCausalLM"]), "config.json", "architectures"),
    "nonsense": (
        edit(rope_scaling={"rope_type": "nonsense"}), "config.json", "rope_scaling.rope_type",
    ),
    "mute": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json", ""),
    "garbled": (garble, "chat_template.jinja", ""),
    "taller": (
        edit(num_hidden_layers=3), "model.safetensors", "model.layers.2.input_layernorm.weight",
    ),
}  # fmt: skip


@pytest.fixture(name="models", scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models: one that can be loaded, and those that cannot."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "good", context_max=CONTEXT)
    for name, (change, _, _) in BROKEN.items():
        change(write_tiny_model(root / name, seed=2))
    return root


@pytest_asyncio.fixture(name="server", loop_scope="module", scope="module")
async def full_server(models: Path) -> AsyncIterator[Served]:
    """A server of all of them, full with the good one."""
    names = ("good", *BROKEN)
    options = [part for name in names for part in ("--model", f"{name}={models / name}")]
    async with serve(*FULL, *options) as server, Client(server.address) as client:
        await client.complete("once", model="good", sampling=GREEDY, max_tokens=1)
        yield server


async def refusal_of(call: Any) -> tuple[str, str]:
    """Return the file and the field of the error that a call ends with."""
    with pytest.raises(InvalidModel) as caught:
        await call
    return caught.value.file, caught.value.field


async def load_model(client: Client, model: str) -> None:
    """Have a model ready."""
    async with client.load(model) as updates:
        async for _ in updates:
            pass


@asynccontextmanager
async def in_use(client: Client) -> AsyncIterator[None]:
    """Have a stream of the good model going on around the body."""
    async with client.generate("once", model="good", sampling=GREEDY, ignore_eos=True) as stream:

        async def read() -> None:
            async for event in stream:
                if isinstance(event, Delta):
                    begun.set()

        begun = asyncio.Event()
        reading = asyncio.create_task(read())
        await begun.wait()
        yield
        assert not reading.done()
        reading.cancel()
        await asyncio.wait({reading})


@pytest.mark.parametrize("used", [True, False], ids=["in use", "idle"])
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_nobody_can_load_evicts_nobody(
    name: str, models: Path, server: Served, *, used: bool
) -> None:
    """Whatever is asked of it, by its name or its folder: nobody is launched, nobody goes."""
    place = BROKEN[name][1:]
    async with Client(server.address) as client:
        before = await client.status()
        calls = (
            lambda: client.complete("once", model=name, max_tokens=1),
            lambda: client.embed(["once"], model=name),
            lambda: client.tokenize("once", model=name),
            lambda: client.fit(name),
            lambda: load_model(client, name),
            lambda: load_model(client, str(models / name)),
        )
        if used:
            async with in_use(client):
                refusals = [await refusal_of(call()) for call in calls]
        else:
            refusals = [await refusal_of(call()) for call in calls]
        after = await client.status()

    assert refusals == [place] * len(calls)
    assert [worker.pid for worker in after.workers] == [worker.pid for worker in before.workers]
    assert len(after.workers) == 1
    assert server.count("unloading") == 0


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.asyncio(loop_scope="module")
async def test_fit_tells_what_is_wrong_with_a_model(
    name: str, models: Path, server: Served
) -> None:
    """`mlxd fit` ends with the error, its file and key, by name or folder, and shows no sum."""
    _, file, field = BROKEN[name]
    for model in (name, str(models / name)):
        ran = await mlxd("fit", model, "--address", server.address)

        assert ran.code != 0
        assert ran.out == ""
        assert f"{file}: {field}".removesuffix(": ") in ran.err
