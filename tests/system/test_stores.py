"""Models of real stores, served by real processes: listed, fitted, loaded, answering."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mlxd import Client, SamplingOptions
from mlxd_controller.store.aliases import set_alias
from mlxd_shared.domain.figures import ModelState
from tests.support.made_stores import (
    PARAMETERS,
    TENSOR,
    OllamaStore,
    commit_of,
    tensor_file,
    write_hub_model,
)
from tests.support.served import serve

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
PROMPT = "Once upon a time"
GREEDY = SamplingOptions(temperature=0.0)


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Client]:
    """Serve the stores below `root`, and the built-in model as `demo`."""
    environment = {
        "MLXD_MODELS_DIR": str(root / "models"),
        "MLXD_HUB_CACHE": str(root / "hub"),
        "MLXD_OLLAMA_MODELS": str(root / "ollama"),
    }
    async with serve(environment=environment) as server, Client(server.address) as client:
        yield client


async def continuation_of(client: Client, model: str) -> str:
    """Return what a model goes on with."""
    return (await client.complete(PROMPT, model=model, sampling=GREEDY, max_tokens=12)).text


@pytest.mark.asyncio
async def test_models_of_every_store_are_listed_fitted_loaded_and_served(tmp_path: Path) -> None:
    """The built-in model in a hub's cache and in Ollama's store, a blob a tensor, says what it says
    by itself; all names of one digest are one load and one worker."""
    write_hub_model(tmp_path / "hub", "org/demo", DEMO, commit=commit_of("1"), refs=("main", "v1"))
    store = OllamaStore(tmp_path / "ollama")
    layers = store.layers_of(DEMO)
    store.manifest("demo", layers)
    store.manifest("copy", [*reversed(layers), layers[0]], tag="8b")
    set_alias(tmp_path / "models", "best", "ollama:demo")
    async with serving(tmp_path) as client:
        models = {model.name: model for model in await client.models()}
        assert {name: model.store for name, model in models.items()} == {
            "demo": "folder", "best": "ollama"
        }  # fmt: skip
        assert models["demo"].aliases == ("org/demo", "org/demo@v1")
        assert models["best"].aliases == ("copy:8b", "demo:latest")
        assert models["demo"].stored_nbytes == models["best"].stored_nbytes

        fits = [await client.fit(name) for name in ("org/demo", "copy:8b")]
        assert fits[0].need_nbytes == fits[1].need_nbytes > 0
        texts = [
            await continuation_of(client, name)
            for name in ("demo", "org/demo@v1", "best", "copy:8b", "demo:latest")
        ]
        assert len(set(texts)) == 1
        assert texts[0]
        status = await client.status()
        assert len(status.workers) == 2
        (loads,) = (f for f in status.metrics if f.name == "mlxd_model_loads_total")
        assert sorted(point.value for point in loads.points) == [1, 1]


@pytest.mark.asyncio
async def test_what_is_damaged_hides_nothing_and_says_what_it_is(tmp_path: Path) -> None:
    """Listed as failed with the file that is wrong; a tensor that two blobs hold with other values
    is found by the load; default options of the manifest are in force."""
    snapshot = write_hub_model(tmp_path / "hub", "o/cut", DEMO, commit=commit_of("1"))
    weights = (snapshot / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-5])
    store = OllamaStore(tmp_path / "ollama")
    layers = store.layers_of(DEMO)
    norm = next(layer for layer in layers if layer["name"] == "model.norm.weight")
    blob = store.root / "blobs" / norm["digest"].replace(":", "-")
    header_nbytes = 8 + int.from_bytes(blob.read_bytes()[:8], "little")
    content = bytearray(blob.read_bytes()[header_nbytes:])
    content[0] ^= 1
    shape = (len(content) // 4,)
    other = tensor_file({"model.norm.weight": ("F32", shape, bytes(content))}, {"more": "x"})
    store.manifest("twice", [*layers, store.layer(TENSOR, "again", other)])
    options = store.layer(PARAMETERS, "", b'{"temperature": 0.125}')
    store.manifest("cool", [*layers, options])
    async with serving(tmp_path) as client:
        models = {model.name: model for model in await client.models()}
        assert models["o/cut"].state is ModelState.FAILED
        assert "truncated" in models["o/cut"].error
        assert models["cool:latest"].effective_sampling.temperature == 0.125
        with pytest.raises(Exception, match="norm"):
            await continuation_of(client, "twice")
        assert await continuation_of(client, "cool")
    shutil.rmtree(tmp_path)
