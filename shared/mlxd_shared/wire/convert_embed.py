"""The part of `convert` that reads what is to become vectors."""

from __future__ import annotations

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import EmbedSpec
from mlxd_shared.wire.convert_bounds import check_count
from mlxd_shared.wire.records import read


def embed_from_pb(pb: inference_pb2.EmbedRequest, *, is_checked: bool = False) -> EmbedSpec:
    """Return the request, checked for everything that needs no model, if it is not already.

    Raises:
        InvalidRequest: fields out of range, each with its limit.
    """
    violations = [] if is_checked else _violations(pb)
    if violations:
        raise InvalidRequest(tuple(violations))
    return read(EmbedSpec, pb)


def _violations(pb: inference_pb2.EmbedRequest) -> list[FieldViolation]:
    violations = check_count("model", len(pb.model), config.MODEL_NAME_CHARS_MAX, "characters")
    # What is too many is not walked.
    texts = pb.texts if len(pb.texts) <= config.EMBED_TEXTS_MAX else ()
    if not texts:
        violations.append(FieldViolation("texts", f"1 to {config.EMBED_TEXTS_MAX} texts"))
    empty = next((index for index, text in enumerate(texts) if not text), None)
    if empty is not None:
        violations.append(FieldViolation(f"texts[{empty}]", "the text is empty"))
    count = sum(map(len, texts))
    violations += check_count("texts", count, config.PROMPT_CHARS_MAX, "characters in all texts")
    if pb.HasField("dimensions") and pb.dimensions == 0:
        violations.append(FieldViolation("dimensions", "0 is below 1"))
    if pb.pooling not in inference_pb2.Pooling.values():
        violations.append(FieldViolation("pooling", f"{pb.pooling} is not a Pooling"))
    return violations
