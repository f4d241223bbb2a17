"""Bad input to a real controller and worker: a typed error with its place, and nothing is lost.

After each refusal the same server answers the next good request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.domain.errors import (
    BackendProblem,
    InvalidModel,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
)
from mlxd_shared.security.net import CHANNEL_OPTIONS
from mlxd_shared.wire.status import code_of
from tests.support.served import serve
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.system.wire.model_probes import load
from tests.system.wire.probe import Wire, refusal
from tests.system.wire.walk import Recorder

CONTEXT = 64


@pytest_asyncio.fixture(name="wire", loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """A real controller that offers a tiny model with a short context."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "good", context_max=CONTEXT)
    async with (
        serve("--model", f"good={folder}") as process,
        grpc.aio.insecure_channel(process.address, options=list(CHANNEL_OPTIONS)) as channel,
    ):
        yield Wire(channel, Recorder(), "good", folder)


async def still_serves(wire: Wire) -> None:
    """The next good request is answered in full."""
    assert len(await wire.ids(max_tokens=3, ignore_eos=True)) == 3


def sampling(**options: Any) -> dict[str, Any]:
    """Return request fields with these sampling options."""
    return {"sampling": types_pb2.SamplingOptions(**options)}


def tokens(*ids: int) -> dict[str, Any]:
    """Return request fields with this prompt."""
    return {"tokens": inference_pb2.TokenIds(ids=ids)}


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": ""}, "text", "empty"),
    (tokens(), "tokens", "empty"),
    (tokens(VOCAB), "tokens.ids", f"{VOCAB} tokens"),
    (tokens(*[5] * CONTEXT), "tokens", f"{CONTEXT}"),
    ({"text": "word " * 5000}, "text", f"{CONTEXT}"),
    ({"max_tokens": 0}, "max_tokens", "below 1"),
    ({"max_tokens": -1}, "max_tokens", "below 1"),
    ({"stop": [""]}, "stop[0]", "1 to 256"),
    ({"stop": ["x" * 257]}, "stop[0]", "1 to 256"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", f"{VOCAB} tokens"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "256"),
    ({"request_id": "x" * 129}, "request_id", "128"),
    ({"model": "x" * 513}, "model", "512"),
    (sampling(temperature=-0.1), "sampling.temperature", "[0, 100]"),
    (sampling(temperature=101), "sampling.temperature", "[0, 100]"),
    (sampling(temperature=float("nan")), "sampling.temperature", "[0, 100]"),
    (sampling(temperature=float("inf")), "sampling.temperature", "[0, 100]"),
    (sampling(top_k=-2), "sampling.top_k", "[-1, "),
    (sampling(top_p=-0.1), "sampling.top_p", "[0, 1]"),
    (sampling(top_p=1.1), "sampling.top_p", "[0, 1]"),
    (sampling(min_p=-0.1), "sampling.min_p", "[0, 1]"),
    (sampling(min_p=1.1), "sampling.min_p", "[0, 1]"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "[0.0625, 10]"),
    (sampling(repetition_penalty=11), "sampling.repetition_penalty", "[0.0625, 10]"),
    (sampling(presence_penalty=11), "sampling.presence_penalty", "[-10, 10]"),
    (sampling(frequency_penalty=-11), "sampling.frequency_penalty", "[-10, 10]"),
    (sampling(repeat_last_n=-2), "sampling.repeat_last_n", "[-1, "),
    (sampling(xtc_probability=1.1), "sampling.xtc_probability", "[0, 1]"),
    (sampling(xtc_threshold=0.6), "sampling.xtc_threshold", "[0, 0.5]"),
    (sampling(logit_bias={VOCAB: 1.0}), f"sampling.logit_bias[{VOCAB}]", f"{VOCAB} tokens"),
    (sampling(logit_bias={1: 101.0}), "sampling.logit_bias[1]", "[-100, 100]"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", "1024"),
]


@pytest.mark.asyncio(loop_scope="module")
async def test_each_bad_request_names_its_field_and_limit(wire: Wire) -> None:
    """INVALID_ARGUMENT with the field and the limit; then a good request is served."""
    await still_serves(wire)
    for fields, field, limit in BAD_REQUESTS:
        error = await refusal(wire.generate(**fields))
        assert isinstance(error, InvalidRequest), (fields, error)
        places = {violation.field: violation.description for violation in error.violations}
        assert field in places, (field, places)
        assert limit in places[field], (field, places)
        await still_serves(wire)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_prompt_and_no_model(wire: Wire) -> None:
    """A request without a prompt is INVALID_ARGUMENT, an unknown model NOT_FOUND."""
    bare = inference_pb2.GenerateRequest(model="good")
    error = await refusal(_read_all(wire.inference.Generate(bare)))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "prompt"
    unknown = await refusal(wire.generate(model="nobody"))
    assert isinstance(unknown, ModelNotFound)
    assert unknown.model == "nobody"
    await still_serves(wire)


async def _read_all(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    async for _ in call:
        pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_top_k_above_the_vocabulary_is_clamped(wire: Wire) -> None:
    """Clients send it; it means the whole vocabulary."""
    hot = {"temperature": 2.0, "top_p": 1.0, "seed": 3}
    beyond = await wire.ids(**sampling(top_k=VOCAB + 1000, **hot))
    assert beyond == await wire.ids(**sampling(top_k=VOCAB, **hot))
    assert beyond == await wire.ids(**sampling(top_k=0, **hot))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BREAKAGES: list[tuple[Callable[[Path], object], str, str]] = [
    (_truncate, "model.safetensors", "truncated"),
    (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", ""),
    (lambda f: (f / "config.json").unlink(), "config.json", "missing"),
    (lambda f: (f / "config.json").write_text("{"), "config.json", "JSON"),
    (lambda f: _edit_config(f, architectures=None), "config.json", "architectures"),
    (lambda f: _edit_config(f, architectures=["Nobody"]), "config.json", "Nobody"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "missing"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json", ""),
]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_damaged_model_is_refused_by_file(wire: Wire, tmp_path: Path) -> None:
    """FAILED_PRECONDITION with the file and what is wrong in it; the good model goes on."""
    for number, (damage, file, problem) in enumerate(BREAKAGES):
        folder = write_tiny_model(tmp_path / f"bad{number}")
        damage(folder)
        error = await refusal(load(wire, model_pb2.LoadModelRequest(model=str(folder))))
        assert isinstance(error, InvalidModel), error
        assert code_of(error) is grpc.StatusCode.FAILED_PRECONDITION
        assert file in error.file, error
        assert problem in f"{error.field} {error.problem}", error
        assert str(tmp_path) not in error.describe()
        await still_serves(wire)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_damaged_after_it_was_configured_fails_its_requests(
    wire: Wire, tmp_path: Path
) -> None:
    """Generate on demand meets the damage at load time, and says the same as LoadModel."""
    folder = write_tiny_model(tmp_path / "later")
    await load(wire, model_pb2.LoadModelRequest(model=str(folder), name="later"))
    await wire.models.UnloadModel(model_pb2.UnloadModelRequest(model="later"))
    _truncate(folder)
    errors: list[MlxdError] = [await refusal(wire.generate(model="later")) for _ in range(2)]
    for error in errors:
        assert isinstance(error, InvalidModel), error
        assert "model.safetensors" in error.file
    await still_serves(wire)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_machine_without_one_backend_says_so(tmp_path: Path) -> None:
    """Two backends at once are refused with what to do; mended, the same server serves."""
    folder = write_tiny_model(tmp_path / "good")
    extra = tmp_path / "packages" / "mlx_cuda_13-0.32.4.dist-info"
    extra.mkdir(parents=True)
    metadata = extra / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n")
    async with (
        serve("--model", f"good={folder}", environment={"PYTHONPATH": str(extra.parent)}) as one,
        grpc.aio.insecure_channel(one.address, options=list(CHANNEL_OPTIONS)) as channel,
    ):
        wire = Wire(channel, Recorder(), "good", folder)
        error = await refusal(wire.generate())
        assert isinstance(error, BackendProblem), error
        assert code_of(error) is grpc.StatusCode.FAILED_PRECONDITION
        assert "mlx-cpu and mlx-cuda-13" in error.problem
        metadata.unlink()
        extra.rmdir()
        await still_serves(wire)
