"""Probes of Embed's fields, through the controller."""

from __future__ import annotations

import shutil
from typing import Any

from mlxd.v1 import inference_pb2, model_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.system.wire.model_probes import get, load
from tests.system.wire.probe import Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering


@covering(
    "EmbedRequest.model",
    "EmbedRequest.texts",
    "EmbedRequest.dimensions",
    "EmbedRequest.pooling",
    "EmbedRequest.normalize",
    "EmbedRequest.worker_incarnation",
)
async def texts_become_vectors(wire: Wire) -> None:
    """A vector a text; shortened and scaled as asked, and another one by another pooling."""

    async def embed(*texts: str, **fields: Any) -> list[list[float]]:
        request = inference_pb2.EmbedRequest(model=wire.model, texts=texts, **fields)
        answer = wire.recorder.see(await wire.inference.Embed(request))
        assert answer.prompt_tokens > len(texts)
        return [list(vector.values) for vector in answer.embeddings]

    (king, sea) = await embed("The king", "The sea")
    assert king != sea
    assert abs(sum(value * value for value in king) - 1) < 1e-4
    (raw,) = await embed("The king", normalize=False, dimensions=3)
    assert len(raw) == 3
    length = sum(value * value for value in raw) ** 0.5
    (short,) = await embed("The king", dimensions=3)
    assert all(abs(a / length - b) < 1e-4 for a, b in zip(raw, short, strict=True))
    (mean,) = await embed("The king", pooling=inference_pb2.POOLING_MEAN)
    assert mean != king
    for fields in ({"texts": [""]}, {"texts": ["a"], "worker_incarnation": "x"}):
        request = inference_pb2.EmbedRequest(model=wire.model, **fields)
        error = await refusal(wire.inference.Embed(request))
        assert isinstance(error, InvalidRequest)
    assert not (await get(wire, wire.model)).has_pooling


@covering()
async def a_pooling_is_shown(wire: Wire) -> None:
    """A model whose files say how texts become vectors was made for it."""
    folder = wire.folder.with_name("pooled")
    shutil.copytree(wire.folder, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    request = model_pb2.LoadModelRequest(model=str(folder), validate_only=True)
    (only,) = await load(wire, request)
    assert only.model.has_pooling
