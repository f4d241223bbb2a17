"""The part of `convert` that reads what an output must look like."""

from __future__ import annotations

from typing import Any

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.wire.convert_bounds import check_count

FIELD = "response_format"


def format_from_pb(pb: inference_pb2.ResponseFormat) -> ResponseFormat | None:
    """Return the format, unchecked; None if there is none (`json_object` false means none)."""
    field = pb.WhichOneof("kind")
    if field is None:
        return None
    kind, value = FormatKind(field), getattr(pb, field)
    if kind is FormatKind.CHOICE:
        return ResponseFormat(kind, choices=tuple(value.choices))
    if kind is FormatKind.JSON_OBJECT:
        return ResponseFormat(kind) if value else None
    return ResponseFormat(kind, value)


def format_to_pb(wanted: ResponseFormat) -> inference_pb2.ResponseFormat:
    """Return the format for the wire."""
    values = {FormatKind.JSON_OBJECT: True, FormatKind.CHOICE: {"choices": wanted.choices}}
    value: Any = values.get(wanted.kind, wanted.text)
    return inference_pb2.ResponseFormat(**{wanted.kind.value: value})


def format_texts(wanted: ResponseFormat | None) -> tuple[str, ...]:
    """Return the field that a format's texts are on the wire, and the texts behind it."""
    if wanted is None or wanted.kind is FormatKind.JSON_OBJECT:
        return (FIELD,)
    field = f"{FIELD}.{wanted.kind.value}"
    if wanted.kind is FormatKind.CHOICE:
        return f"{field}.choices", *wanted.choices
    return field, wanted.text


def ending_violations(pb: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    """Return what keeps a format's end from being the output's."""
    if not pb.ignore_eos or format_from_pb(pb.response_format) is None:
        return []
    problem = "not with response_format: the output ends where its format is complete"
    return [FieldViolation("ignore_eos", problem)]


def format_violations(pb: inference_pb2.ResponseFormat) -> list[FieldViolation]:
    """Return what is out of bounds; whether a grammar is valid is left to the compiler."""
    wanted = format_from_pb(pb)
    if wanted is None or wanted.kind is FormatKind.JSON_OBJECT:
        return []
    field, *texts = format_texts(wanted)
    if wanted.kind is FormatKind.CHOICE and not 1 <= len(texts) <= config.FORMAT_CHOICES_MAX:
        return [FieldViolation(field, f"1 to {config.FORMAT_CHOICES_MAX} choices")]
    if not all(texts):
        return [FieldViolation(field, "a text is empty")]
    return check_count(field, sum(map(len, texts)), config.FORMAT_CHARS_MAX, "characters")
