"""The part of `convert` that reads what is to become vectors."""

from __future__ import annotations

from collections.abc import Sequence

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import EmbedSpec, Pooling
from mlxd_shared.wire.convert_bounds import name_violations

POOLING_TO_PB = {
    None: inference_pb2.POOLING_UNSPECIFIED,
    Pooling.LAST_TOKEN: inference_pb2.POOLING_LAST_TOKEN,
    Pooling.MEAN: inference_pb2.POOLING_MEAN,
}
POOLING_FROM_PB = {number: pooling for pooling, number in POOLING_TO_PB.items()}


def embed_from_pb(pb: inference_pb2.EmbedRequest, *, is_checked: bool = False) -> EmbedSpec:
    """Return the request, checked for everything that needs no model, if it is not already.

    Raises:
        InvalidRequest: fields out of range, each with its limit.
    """
    countable = 1 <= len(pb.texts) <= config.EMBED_TEXTS_MAX
    texts = tuple(pb.texts) if countable else ()  # what is too many is not walked
    violations = [] if is_checked else _violations(pb, texts)
    if violations:
        raise InvalidRequest(tuple(violations))
    return EmbedSpec(
        model=pb.model,
        texts=texts,
        pooling=POOLING_FROM_PB[pb.pooling],
        dimensions=pb.dimensions if pb.HasField("dimensions") else None,
        normalize=pb.normalize if pb.HasField("normalize") else None,
        worker_incarnation=pb.worker_incarnation,
    )


def _violations(pb: inference_pb2.EmbedRequest, texts: Sequence[str]) -> list[FieldViolation]:
    violations = name_violations(pb.model)
    if not texts:
        violations.append(FieldViolation("texts", f"1 to {config.EMBED_TEXTS_MAX} texts"))
    empty = next((index for index, text in enumerate(texts) if not text), None)
    if empty is not None:
        violations.append(FieldViolation(f"texts[{empty}]", "the text is empty"))
    if sum(map(len, texts)) > config.PROMPT_CHARS_MAX:
        limit = f"at most {config.PROMPT_CHARS_MAX} characters in all texts"
        violations.append(FieldViolation("texts", limit))
    if pb.HasField("dimensions") and pb.dimensions == 0:
        violations.append(FieldViolation("dimensions", "0 is below 1"))
    if pb.pooling not in POOLING_FROM_PB:
        violations.append(FieldViolation("pooling", f"{pb.pooling} is not a Pooling"))
    return violations
