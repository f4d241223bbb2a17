"""What is to become vectors: each bound is told of by the field that a client has set."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import EmbedSpec, Pooling
from mlxd_shared.wire.convert_embed import embed_from_pb

Embed = inference_pb2.EmbedRequest
UNKNOWN: Any = 99
LONG = "x" * (config.PROMPT_CHARS_MAX // 2 + 1)
BAD = [
    (Embed(model="m" * (config.MODEL_NAME_CHARS_MAX + 1), texts=["a"]), ["model"]),
    (Embed(), ["texts"]),
    (Embed(texts=["a"] * (config.EMBED_TEXTS_MAX + 1)), ["texts"]),
    (Embed(texts=["a", "", ""]), ["texts[1]"]),
    (Embed(texts=[LONG, LONG]), ["texts"]),
    (Embed(texts=["a"], dimensions=0, pooling=UNKNOWN), ["dimensions", "pooling"]),
]


@pytest.mark.parametrize(("request_pb", "fields"), BAD, ids=["-".join(names) for _, names in BAD])
def test_what_is_out_of_bounds_is_named(request_pb: Embed, fields: list[str]) -> None:
    """All that is wrong at once."""
    with pytest.raises(InvalidRequest) as caught:
        embed_from_pb(request_pb)
    assert [violation.field for violation in caught.value.violations] == fields


def test_every_field_arrives() -> None:
    """What is in bounds, as it came."""
    request = Embed(model="m", texts=["a", "b"], dimensions=1, pooling=inference_pb2.POOLING_MEAN)
    spec = embed_from_pb(request)
    assert isinstance(spec, EmbedSpec)
    assert (spec.model, spec.texts, spec.dimensions) == ("m", ("a", "b"), 1)
    assert spec.pooling is Pooling.MEAN
