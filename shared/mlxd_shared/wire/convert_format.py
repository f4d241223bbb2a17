"""The part of `convert` that reads what an output must look like."""

from __future__ import annotations

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldViolation
from mlxd_shared.domain.formats import FormatKind, ResponseFormat

FIELD = "response_format"


def format_from_pb(pb: inference_pb2.ResponseFormat) -> ResponseFormat | None:
    """Return the format, unchecked; None where none is asked for (`json_object` false is none)."""
    match pb.WhichOneof("kind"):
        case "json_schema":
            return ResponseFormat(FormatKind.JSON_SCHEMA, pb.json_schema)
        case "json_object":
            return ResponseFormat(FormatKind.JSON_OBJECT) if pb.json_object else None
        case "regex":
            return ResponseFormat(FormatKind.REGEX, pb.regex)
        case "ebnf_grammar":
            return ResponseFormat(FormatKind.EBNF_GRAMMAR, pb.ebnf_grammar)
        case "choice":
            return ResponseFormat(FormatKind.CHOICE, choices=tuple(pb.choice.choices))
        case _:
            return None


def format_to_pb(wanted: ResponseFormat | None) -> inference_pb2.ResponseFormat | None:
    """Return the format for the wire; None where there is none."""
    if wanted is None:
        return None
    match wanted.kind:
        case FormatKind.JSON_SCHEMA:
            return inference_pb2.ResponseFormat(json_schema=wanted.text)
        case FormatKind.JSON_OBJECT:
            return inference_pb2.ResponseFormat(json_object=True)
        case FormatKind.REGEX:
            return inference_pb2.ResponseFormat(regex=wanted.text)
        case FormatKind.EBNF_GRAMMAR:
            return inference_pb2.ResponseFormat(ebnf_grammar=wanted.text)
        case FormatKind.CHOICE:
            choice = inference_pb2.ChoiceFormat(choices=wanted.choices)
            return inference_pb2.ResponseFormat(choice=choice)


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
    """Return what is out of bounds; whether a grammar makes sense is for whoever compiles it."""
    wanted = format_from_pb(pb)
    if wanted is None or wanted.kind is FormatKind.JSON_OBJECT:
        return []
    field, *texts = format_texts(wanted)
    if wanted.kind is FormatKind.CHOICE and not 1 <= len(texts) <= config.FORMAT_CHOICES_MAX:
        return [FieldViolation(field, f"1 to {config.FORMAT_CHOICES_MAX} choices")]
    if not all(texts):
        return [FieldViolation(field, "a text is empty")]
    if sum(map(len, texts)) > config.FORMAT_CHARS_MAX:
        return [FieldViolation(field, f"at most {config.FORMAT_CHARS_MAX} characters")]
    return []
