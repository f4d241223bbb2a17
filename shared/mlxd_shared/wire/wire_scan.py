"""What a serialised request holds, counted on the bytes before anything is made of them. Pure.

A parser makes an object of every two bytes if a message is written so: 60 MB become seconds of work
and gigabytes before the first check. So the bytes are walked first: only tags and lengths are read,
texts are stepped over, and the walk ends at the first bound that is passed.

Invariants:
- Work is in proportion to the parts that are counted, whatever they hold, and so is that of parsing
  what has passed.
- What is not known is counted like what is known. What no parser would read alike is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest

# A character takes up to four bytes.
LONG_TEXTS_NBYTES: dict[str, int] = {
    "mlxd.v1.GenerateRequest.text": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.TokenizeRequest.text": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.EmbedRequest.texts": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ScoredText.text": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ScoredText.continuations": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.Reranking.query": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.Reranking.instruction": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ContentPart.text": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ContentPart.image": config.IMAGE_BYTES_MAX,
    "mlxd.v1.ChatMessage.content": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ChatMessage.reasoning": 4 * config.PROMPT_CHARS_MAX,
    "mlxd.v1.ToolCall.arguments_json": 4 * config.CHAT_JSON_TEXT_CHARS_MAX,
    "mlxd.v1.ChatPrompt.tools_json": 4 * config.CHAT_JSON_TEXT_CHARS_MAX,
    "mlxd.v1.ChatPrompt.template_variables_json": 4 * config.CHAT_JSON_TEXT_CHARS_MAX,
    "mlxd.v1.ResponseFormat.json_schema": 4 * config.FORMAT_CHARS_MAX,
    "mlxd.v1.ResponseFormat.regex": 4 * config.FORMAT_CHARS_MAX,
    "mlxd.v1.ResponseFormat.ebnf_grammar": 4 * config.FORMAT_CHARS_MAX,
    "mlxd.v1.ChoiceFormat.choices": 4 * config.FORMAT_CHARS_MAX,
    # The same at a router's door.
    "vllm.grpc.engine.GenerateRequest.text": 4 * config.PROMPT_CHARS_MAX,
    "vllm.grpc.engine.TokenizedInput.original_text": 4 * config.PROMPT_CHARS_MAX,
    "vllm.grpc.engine.SamplingParams.json_schema": 4 * config.FORMAT_CHARS_MAX,
    "vllm.grpc.engine.SamplingParams.regex": 4 * config.FORMAT_CHARS_MAX,
    "vllm.grpc.engine.SamplingParams.grammar": 4 * config.FORMAT_CHARS_MAX,
    "vllm.grpc.engine.SamplingParams.structural_tag": 4 * config.FORMAT_CHARS_MAX,
    "vllm.grpc.engine.ChoiceConstraint.choices": 4 * config.FORMAT_CHARS_MAX,
}
"""The fields that may be longer than REQUEST_TEXT_BYTES_MAX."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TAG_BYTES_MAX = 5
_WRITTEN = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")  # a number of variable length
_DEPTH_MAX = 16  # of messages within messages; those of today reach 5
_PIECE_NBYTES = 1 << 20
_CONTINUED = bytes(range(0x80, 0x100))
_WIDTHS = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold at most; `numbers` are those of lists of numbers."""

    nbytes: int = config.REQUEST_BYTES_MAX
    parts: int = config.REQUEST_PARTS_MAX
    numbers: int = config.TOKENIZE_IDS_MAX


FROM_CLIENTS = Limits()
RELAYED = Limits(
    nbytes=config.RELAYED_REQUEST_BYTES_MAX,
    parts=config.REQUEST_PARTS_MAX + config.RELAYED_PARTS_MAX,
    numbers=config.TOKENIZE_IDS_MAX + config.RELAYED_IDS_MAX,
)
"""With room for what a controller adds: the output so far, and for whom and since when it is."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a request was found to hold."""

    nbytes: int
    parts: int = 0
    """Fields and entries of lists, in messages within messages too."""
    numbers: int = 0

    @property
    def held_nbytes(self) -> int:
        """What a server holds for it, at most: the bytes, the message, and what is made of it."""
        return (
            config.REQUEST_COPIES * self.nbytes
            + config.REQUEST_PART_BYTES * self.parts
            + config.REQUEST_NUMBER_BYTES * self.numbers
        )


@dataclass(frozen=True, slots=True)
class _Field:
    """A field whose values have a length."""

    name: str
    inner: Plan | None
    width: int | None
    """Of a number in a list of them, in bytes; 0 where it varies, None: it is no such list."""
    nbytes_max: int


class Plan:
    """How messages of one type are walked; see `plan_of`."""

    __slots__ = ("fields", "name", "names", "takes_much")

    def __init__(self, descriptor: Descriptor, known: dict[str, Plan] | None = None) -> None:
        """Read the type, and those of the messages within it."""
        known = {} if known is None else known
        known[descriptor.full_name] = self
        self.name = descriptor.full_name
        self.fields: dict[int, _Field] = {}
        self.names: dict[int, str] = {}
        self.takes_much = False  # until all of it is known: a message may be within itself
        for field in descriptor.fields:
            self.names[field.number] = field.name
            plan = _field(field, known)
            if plan is not None:
                self.fields[field.number << 3 | _BYTES] = plan
        self.takes_much = any(
            field.inner.takes_much
            if field.inner is not None
            else field.width is not None or field.nbytes_max > config.REQUEST_TEXT_BYTES_MAX
            for field in self.fields.values()
        )
        """Whether it holds a prompt, texts or ids; all other requests are small."""


@lru_cache(maxsize=256)
def plan_of(descriptor: Descriptor) -> Plan:
    """Return how messages of a type are walked; made once, for every call asks."""
    return Plan(descriptor)


def _field(field: FieldDescriptor, known: dict[str, Plan]) -> _Field | None:
    if field.message_type is not None:
        name = field.message_type.full_name
        inner = known.get(name) or Plan(field.message_type, known)
        return _Field(field.name, inner, None, config.RELAYED_REQUEST_BYTES_MAX)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        most = LONG_TEXTS_NBYTES.get(field.full_name, config.REQUEST_TEXT_BYTES_MAX)
        return _Field(field.name, None, None, most)
    if field.is_repeated:
        width = _WIDTHS.get(field.type, 0)
        return _Field(field.name, None, width, config.RELAYED_REQUEST_BYTES_MAX)
    return None


def scan(raw: bytes, plan: Plan, limits: Limits) -> Size:
    """Return what a request holds, if a server may parse it.

    Raises:
        InvalidRequest: a bound is passed; names the field and the bound.
        DecodeError: not a message, or not one that this protocol has.
    """
    nbytes_max = limits.nbytes
    if not plan.takes_much:
        nbytes_max = min(nbytes_max, config.SMALL_REQUEST_BYTES_MAX)
    if len(raw) > nbytes_max:
        limit = f"has {len(raw)} bytes; at most {nbytes_max} in a request of this method"
        raise InvalidRequest.of("request", limit)
    walk = _Walk(raw, limits)
    try:
        walk.message(0, len(raw), plan, 0)
    except _Passed as passed:
        raise InvalidRequest.of(".".join(passed.path), passed.limit) from None
    return Size(len(raw), limits.parts - walk.parts_left, limits.numbers - walk.numbers_left)


class _Passed(Exception):
    """A bound that is passed, in a field that `path` leads to."""

    def __init__(self, name: str, limit: str) -> None:
        self.path = [name]
        self.limit = limit


class _Walk:
    """Goes once through one request."""

    def __init__(self, raw: bytes, limits: Limits) -> None:
        self._raw = raw
        self._limits = limits
        self.parts_left = limits.parts
        self.numbers_left = limits.numbers

    def message(self, at: int, end: int, plan: Plan, depth: int) -> None:
        """Walk the message that lies in [at, end)."""
        raw = self._raw
        while at < end:
            tag = raw[at]
            at += 1
            if tag >= 0x80:
                tag, at = _number(raw, at - 1, end)
            self.parts_left -= 1
            if self.parts_left < 0 or not tag >> 3:
                self._refuse_tag(tag, plan)
            kind = tag & 7
            if kind == _BYTES:
                at = self._skip_sized(tag, at, end, plan, depth)
            elif kind == _VARINT:
                written = _WRITTEN.match(raw, at, end)
                if written is None:
                    raise DecodeError("a number that does not end")
                at = written.end()
            elif kind == _FIXED32:
                at += 4
            elif kind == _FIXED64:
                at += 8
            else:
                raise DecodeError("a group")
        if at > end:
            raise DecodeError("a field that ends beyond its message")

    def _skip_sized(self, tag: int, at: int, end: int, plan: Plan, depth: int) -> int:
        """Walk a value that begins with its length, and return where it ends."""
        if at < end and self._raw[at] < 0x80:
            size, at = self._raw[at], at + 1
        else:
            size, at = _number(self._raw, at, end)
        stop = at + size
        if stop > end:
            raise DecodeError("a field that ends beyond its message")
        field = plan.fields.get(tag)
        if field is None:
            if size > config.REQUEST_TEXT_BYTES_MAX:
                limit = f"{size} bytes; at most {config.REQUEST_TEXT_BYTES_MAX}"
                raise _Passed(_name(tag, plan), limit)
        elif field.inner is not None:
            if size:
                self._within(field.name, field.inner, at, stop, depth)
        elif field.width is not None:
            self.numbers_left -= self._numbers(at, stop, field.width)
            if self.numbers_left < 0:
                raise _Passed(field.name, f"at most {self._limits.numbers} numbers in a request")
        elif size > field.nbytes_max:
            raise _Passed(field.name, f"{size} bytes; at most {field.nbytes_max}")
        return stop

    def _within(self, name: str, inner: Plan, at: int, stop: int, depth: int) -> None:
        if depth >= _DEPTH_MAX:
            raise _Passed(name, f"at most {_DEPTH_MAX} messages within each other")
        try:
            self.message(at, stop, inner, depth + 1)
        except _Passed as passed:
            passed.path.insert(0, name)
            raise

    def _numbers(self, at: int, stop: int, width: int) -> int:
        """Return how many numbers a list of them holds."""
        if width:
            return (stop - at) // width
        return sum(
            len(self._raw[piece : min(piece + _PIECE_NBYTES, stop)].translate(None, _CONTINUED))
            for piece in range(at, stop, _PIECE_NBYTES)
        )

    def _refuse_tag(self, tag: int, plan: Plan) -> None:
        if not tag >> 3:
            raise DecodeError("a field without a number")
        limit = f"at most {self._limits.parts} fields and entries of lists in a request"
        raise _Passed(_name(tag, plan), limit)


def _name(tag: int, plan: Plan) -> str:
    return plan.names.get(tag >> 3, f"field {tag >> 3}")


def _number(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a tag or a length, and where it ends."""
    value = shift = 0
    for place in range(at, min(at + _TAG_BYTES_MAX, end)):
        byte = raw[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise DecodeError("a number that does not end")
