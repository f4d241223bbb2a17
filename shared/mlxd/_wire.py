"""The client's edge of the wire: requests to protobuf. No defaults here.

What a request's field cannot carry at all (a negative seed, a token id above 32 bits, half a
character) is refused here with the field's name, as the wire's own description of the field says;
every other range is the server's to check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from mlxd.v1 import inference_pb2
from mlxd_shared.config import DURATION_MAX_S
from mlxd_shared.domain import requests as r
from mlxd_shared.domain.chats import Chat, chat_texts, half_character
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.formats import ResponseFormat
from mlxd_shared.wire.convert_format import format_texts, format_to_pb
from mlxd_shared.wire.records import plan_fields, write, write_field

Prompt = str | Sequence[int] | Chat
_M = TypeVar("_M", bound=Message)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: r.INT32,
    FieldDescriptor.CPPTYPE_UINT32: r.UINT32,
    FieldDescriptor.CPPTYPE_UINT64: r.UINT64,
}
_IDS = inference_pb2.TokenIds.DESCRIPTOR.fields_by_name["ids"]


class GenerateOptions(TypedDict, total=False):
    """What may be said of one completion, see `Client.generate`; None is as good as absent."""

    model: str
    sampling: r.SamplingOptions
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: int | None
    """How many alternatives to ask for beside each token's log-probability."""
    speculation_depth: int | None
    response_format: ResponseFormat | None
    skip_special_tokens: bool | None
    priority: int | None
    keep_alive_s: float | None
    request_id: str
    migrate: bool | None
    resume: Sequence[int]
    """The output so far of an interrupted stream."""
    n: int | None
    """How many completions of the prompt to make."""
    echo: bool | None
    prompt_logprobs: int | None
    """How many alternatives to ask for beside the log-probability of each prompt token."""


class ScoreOptions(TypedDict, total=False):
    """What may be said of scores, see `Client.scores`; None is as good as absent."""

    model: str
    parse_special_tokens: bool | None
    reranking: r.Reranking | None
    """What is asked of each text, a document then."""


class EmbedOptions(TypedDict, total=False):
    """What may be said of embeddings, see `Client.embeddings`; None is as good as absent."""

    model: str
    dimensions: int | None
    pooling: r.Pooling | None
    normalize: bool | None


def spell(kind: type[_M], *others: FieldViolation, **values: object) -> _M:
    """Return a message whose fields have these values; what is None stays absent.

    A dataclass becomes the message of its shape, seconds a duration. others: what is wrong with
    values that are not among these.

    Raises:
        InvalidRequest: values that their fields cannot carry; names each field.
    """
    wires: Any = kind.DESCRIPTOR.fields_by_name
    own = (bad for name in values for bad in _violations(name, wires[name], values[name]))
    violations = (*others, *own)
    if violations:
        raise InvalidRequest(violations)
    return kind(**{name: write_field(value, wires[name]) for name, value in values.items()})


def check_options(kind: type, options: Mapping[str, object]) -> None:
    """Refuse what a call has no option for, as Python refuses an argument; a field may have it.

    Raises:
        TypeError: names the first.
    """
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        raise TypeError(f"unexpected option {unknown[0]!r}")


def generate_to_pb(
    prompt: Prompt, **options: Unpack[GenerateOptions]
) -> inference_pb2.GenerateRequest:
    """Return the request; what is None stays absent.

    Raises:
        InvalidRequest: a number, or half a character, that its field cannot carry.
        TypeError: there is no such option.
    """
    check_options(GenerateOptions, options)
    wanted, depth = options.pop("response_format", None), options.pop("speculation_depth", None)
    logprobs, resume = options.pop("logprobs", None), options.pop("resume", ())
    keep_alive_s = options.pop("keep_alive_s", None)
    options.setdefault("sampling", r.SamplingOptions())
    field, *texts = format_texts(wanted)
    request = spell(
        inference_pb2.GenerateRequest,
        *_prompt_violations(prompt),
        *(bad for text in texts for bad in _text_violations(field, text)),
        *r.check_range("speculation.depth_max", depth, *r.UINT32),
        **options,
        logprobs=None if logprobs is None else True,
        top_logprobs=logprobs,
        keep_alive=keep_alive_s,
        resume_from=len(resume) or None,
        resume_token_ids=resume,
    )
    if wanted is not None:
        request.response_format.CopyFrom(format_to_pb(wanted))
    if depth is not None:
        request.speculation.depth_max = depth
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(write(prompt, inference_pb2.ChatPrompt))
    else:
        request.tokens.ids.extend(prompt)
        request.tokens.SetInParent()  # an empty list is still a list of tokens
    return request


def _prompt_violations(prompt: Prompt) -> list[FieldViolation]:
    if isinstance(prompt, str):
        return _text_violations("text", prompt)
    if isinstance(prompt, Chat):
        return [bad for field, text in chat_texts(prompt) for bad in _text_violations(field, text)]
    return _first("tokens.ids", _IDS, prompt)


def _violations(
    place: str,
    wire: FieldDescriptor,
    value: Any,  # noqa: ANN401 - of any field
) -> list[FieldViolation]:
    """Return what a field cannot carry; of a list of numbers or texts, the first that it cannot."""
    if value is None:
        return []
    if not wire.is_repeated:
        return _violations_of_one(place, wire, value)
    shape = wire.message_type
    if shape is None:
        return _first(place, wire, value)
    if shape.GetOptions().map_entry:
        return _first(place, shape.fields_by_name["key"], (key for key, _ in value))
    entries = ((f"{place}[{index}]", each) for index, each in enumerate(value))
    return [bad for at, each in entries for bad in _violations_of_one(at, wire, each)]


def _first(place: str, wire: FieldDescriptor, values: Iterable[Any]) -> list[FieldViolation]:
    bounds = _RANGES.get(wire.cpp_type)
    if bounds is None:
        return next(filter(None, (_violations_of_one(place, wire, each) for each in values)), [])
    low, high = bounds
    bad = next((each for each in values if not low <= each <= high), None)
    return r.check_range(place, bad, low, high)


def _violations_of_one(
    place: str,
    wire: FieldDescriptor,
    value: Any,  # noqa: ANN401 - of any field
) -> list[FieldViolation]:
    shape = wire.message_type
    if isinstance(value, str):
        return _text_violations(place, value)
    if shape is None:
        return _first(place, wire, [value]) if wire.cpp_type in _RANGES else []
    if shape is Duration.DESCRIPTOR:
        if value == math.inf or abs(value) <= DURATION_MAX_S:  # infinity is one: for ever
            return []
        return [FieldViolation(place, f"{value:g} s is outside [0, {DURATION_MAX_S:.0f}]")]
    kind: Any = type(value)  # mypy doubts that a type is hashable
    return [
        bad
        for each in plan_fields(kind, shape)
        for bad in _violations(
            f"{place}.{each.wire}", shape.fields_by_name[each.wire], getattr(value, each.name)
        )
    ]


def _text_violations(field: str, text: str) -> list[FieldViolation]:
    """Return what keeps a text from being on the wire, which carries whole characters alone."""
    problem = half_character(text)
    return [FieldViolation(field, problem)] if problem else []
