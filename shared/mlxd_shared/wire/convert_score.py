"""The part of `convert` that reads which continuations are to be scored."""

from __future__ import annotations

from collections.abc import Iterator

from mlxd.v1 import score_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import ScoreSpec
from mlxd_shared.wire.convert_bounds import check_count
from mlxd_shared.wire.records import read


def score_from_pb(pb: score_pb2.ScoreRequest, *, is_checked: bool = False) -> ScoreSpec:
    """Return the request, checked for everything that needs no model, if it is not already.

    Raises:
        InvalidRequest: fields out of range, each with its limit.
    """
    violations = () if is_checked else tuple(_violations(pb))
    if violations:
        raise InvalidRequest(violations)
    return read(ScoreSpec, pb)


def _violations(pb: score_pb2.ScoreRequest) -> Iterator[FieldViolation]:
    yield from check_count("model", len(pb.model), config.MODEL_NAME_CHARS_MAX, "characters")
    most, most_of_each = config.SCORE_TEXTS_MAX, config.SCORE_CONTINUATIONS_MAX
    if not 1 <= len(pb.texts) <= most:
        yield FieldViolation("texts", f"1 to {most} texts")
        return  # what is too many is not walked
    chars = len(pb.reranking.query) + len(pb.reranking.instruction)
    for index, scored in enumerate(pb.texts):
        place = f"texts[{index}]"
        if not scored.text:
            yield FieldViolation(f"{place}.text", "the text is empty")
            return
        if not 1 <= len(scored.continuations) <= most_of_each:
            yield FieldViolation(f"{place}.continuations", f"1 to {most_of_each} continuations")
            return
        if not all(scored.continuations):
            yield FieldViolation(f"{place}.continuations", "a continuation is empty")
            return
        chars += len(scored.text) + sum(map(len, scored.continuations))
    yield from check_count("texts", chars, config.PROMPT_CHARS_MAX, "characters in all texts")
    if not pb.HasField("reranking"):
        return
    if not pb.reranking.query:
        yield FieldViolation("reranking.query", "the query is empty")
    if pb.parse_special_tokens:
        yield FieldViolation("parse_special_tokens", "not with reranking")
