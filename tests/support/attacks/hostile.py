"""Requests that cost a server much and their sender little, by the kind of attack.

Invariants:
- What is drawn comes from one seed.
- `scale` is 1 for an attack in full, less for one in miniature: sizes and counts go with it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from tests.support.attacks.wire import empty_fields, field, varint

MODEL = "demo"
INFERENCE = "/mlxd.v1.InferenceService/"
MODELS = "/mlxd.v1.ModelService/"
GENERATE = inference_pb2.GenerateRequest
TOKENS = 40
SLOW_S = (5.0, 20.0)
"""What the sender of a slow constraint waits, in miniature and in full."""
MIB = 1 << 20
SERVED_CHARS = 8 << 10
"""A text that the demo model's context could hold."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the bytes of its message, and how long its sender waits."""

    path: str
    body: bytes
    streams: bool = False
    deadline_s: float = 20.0
    messages_max: int = 5000
    """Of a stream; the client goes after so many."""

    @property
    def method(self) -> str:
        """The method's name."""
        return self.path.rpartition("/")[2]


Calls = Callable[[random.Random, float], Iterator[Call]]
"""Yields calls without end; is given a source of random numbers, and a scale."""


def number_of(message: str, name: str) -> int:
    """Return a field's number."""
    descriptor = inference_pb2.DESCRIPTOR.message_types_by_name[message]
    return descriptor.fields_by_name[name].number


def generating(
    request: inference_pb2.GenerateRequest, more: bytes = b"", *, deadline_s: float = 20.0
) -> Call:
    """Return a call of Generate; `more` is written behind the request."""
    request.model = MODEL
    return Call(
        f"{INFERENCE}Generate",
        request.SerializeToString() + more,
        streams=True,
        deadline_s=deadline_s,
    )


def _in_turn(values: Sequence[T], draws: random.Random) -> Iterator[T]:
    """Yield all of them in some order, then in another one, and so on."""
    while True:
        yield from draws.sample(values, len(values))


def tiny_parts(draws: random.Random, scale: float) -> Iterator[Call]:
    """Yield messages of many parts of two bytes, each of which costs a parser a whole object."""
    count = max(int(8 * MIB * scale), 1)
    bias = types_pb2.SamplingOptions.DESCRIPTOR.fields_by_name["logit_bias"].number
    chat, stop = number_of("GenerateRequest", "chat"), number_of("GenerateRequest", "stop")
    sampling = number_of("GenerateRequest", "sampling")
    messages = number_of("ChatPrompt", "messages")
    calls = number_of("ChatMessage", "tool_calls")
    text = GENERATE(text="x", max_tokens=1)
    biases = b"".join(field(bias, b"\x08" + varint(i)) for i in range(count // 8))
    wanted = [
        generating(GENERATE(), field(chat, empty_fields(messages, count))),
        generating(GENERATE(), field(chat, field(messages, empty_fields(calls, count)))),
        generating(text, empty_fields(stop, count)),
        generating(text, field(sampling, biases)),
        generating(text, empty_fields(2047, count)),
        Call(
            f"{INFERENCE}Detokenize",
            inference_pb2.DetokenizeRequest(
                model=MODEL, token_ids=[5] * (count // 2)
            ).SerializeToString(),
        ),
    ]
    yield from _in_turn(wanted, draws)


def constraints(draws: random.Random, scale: float) -> Iterator[Call]:
    """Yield grammars, schemas and patterns that are slow to compile, or to compute masks of."""
    many = max(int(5000 * scale), 10)
    refs: dict[str, object] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(max(many // 200, 8))
    }
    refs[f"d{len(refs)}"] = {"type": "string"}
    schemas = [
        {"$defs": refs, "$ref": "#/$defs/d0"},
        {"enum": [f"v{i}" for i in range(many * 4)]},
        {
            "type": "object",
            "properties": {f"p{i}": {"pattern": "^a*b*$", "type": "string"} for i in range(many)},
        },
        {"anyOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(many)]},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    ]
    chains = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | ""' for i in range(40))
    grammars = [
        "root ::= s*\ns ::= s s s s | s s | [a-z ]* | [a-z]+ s",
        'root ::= s\ns ::= s s | "a" | "b" | s s s | [a-z ]',
        f'root ::= r0\n{chains}\nr40 ::= "a" | ""',
        'root ::= (("a"{1,900}){1,900}){1,900}',
        "root ::= " + "(" * many + '"a"' + ")" * many,
    ]
    patterns = [
        "(a|b)*a(a|b){400}",
        "[^]*a[^]{300}",
        "((((a{0,99}){0,99}){0,99}){0,99}){0,99}",
        "|".join(f"w{i}x" for i in range(many * 4)),
        "[^]{1000000}",
    ]
    formats = [
        *(inference_pb2.ResponseFormat(json_schema=json.dumps(schema)) for schema in schemas),
        *(inference_pb2.ResponseFormat(ebnf_grammar=grammar) for grammar in grammars),
        *(inference_pb2.ResponseFormat(regex=pattern) for pattern in patterns),
    ]
    for wanted in _in_turn(formats, draws):
        sampling = types_pb2.SamplingOptions(temperature=1.0, seed=draws.randrange(1000))
        yield generating(
            GENERATE(text="Once", max_tokens=TOKENS, sampling=sampling, response_format=wanted),
            deadline_s=SLOW_S[scale == 1],
        )


def tokenize(draws: random.Random, scale: float) -> Iterator[Call]:
    """Yield texts of kinds that tokenizers are slow with: far too long for the model, or not."""
    texts = [
        kind * (chars // len(kind))
        for chars in (max(int(8 * MIB * scale), SERVED_CHARS), SERVED_CHARS)
        for kind in ("ab", "the ", " ", "</s>")
    ]
    for text in _in_turn(texts, draws):
        request = inference_pb2.TokenizeRequest(
            model=MODEL, text=text, parse_special_tokens=draws.random() < 0.5
        )
        yield Call(f"{INFERENCE}Tokenize", request.SerializeToString())


def burst(draws: random.Random, _: float) -> Iterator[Call]:
    """Yield small calls that are nothing but many: a look at the model, or one token."""
    look = Call(
        f"{MODELS}GetModel",
        model_pb2.GetModelRequest(model=MODEL).SerializeToString(),
        deadline_s=60.0,
    )
    while True:
        if draws.random() < 0.75:
            yield look
        else:
            body = GENERATE(model=MODEL, text="Once", max_tokens=1).SerializeToString()
            yield Call(f"{INFERENCE}Generate", body, streams=True, deadline_s=60.0)
