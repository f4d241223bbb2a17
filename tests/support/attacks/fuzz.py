"""Calls of every method with messages made at random from what the descriptors say there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from tests.support.attacks.hostile import MODEL, Call

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    status_pb2.DESCRIPTOR.services_by_name["StatusService"],
)
TEXTS = (
    "", "x", MODEL, "Once upon a time", "../../etc/passwd", "/dev/zero", "a" * 5000, "\x00\x1b[31m",
    "🙂\u2028\u202e", "{", '{"a": [' * 200, "{}", '{"type": "object"}', "[a-z]+", 'root ::= "a"',
    "</s>", "user", "assistant", "true", "-1", "*",
)  # fmt: skip
NUMBERS = (0, 1, 2, 5, 17, 127, 1000, 2**31 - 1)
NEGATIVE = (-1, -2, -(2**31))
REALS = (0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
FILLED = (0.02, 0.1, 0.3)
"""How many of a message's fields are set: so few that much is right, or so many that nothing is."""
DEPTH_MAX = 4
DEADLINE_S = 4.0
WATCH_S = 0.2
TOKENS_MAX = 20
KEPT_OUT = ("keep_alive", "priority")
"""What would not be an attack: how long a model stays, and who comes first, anybody may say."""


def fuzz(draws: random.Random, _: float) -> Iterator[Call]:
    """Yield calls of all methods, most of them wrong in one way or another."""
    methods = [method for service in SERVICES for method in service.methods]
    while True:
        method = draws.choice(methods)
        body = _tame(_fill_message(method, draws), draws).SerializeToString()
        if draws.random() < 0.15:
            body = _damage(body, draws)
            if method.name in {"UnloadModel", "LoadModel"}:
                continue  # nobody knows what these would say
        yield Call(
            f"/{method.containing_service.full_name}/{method.name}",
            body,
            streams=method.server_streaming,
            deadline_s=WATCH_S if method.name.startswith("Watch") else DEADLINE_S,
            messages_max=draws.choice((1, 3, 5000)),
        )


def _fill_message(method: MethodDescriptor, draws: random.Random) -> Message:
    message = GetMessageClass(method.input_type)()
    _fill(message, draws, draws.choice(FILLED), DEPTH_MAX)
    return message


def _fill(message: Message, draws: random.Random, filled: float, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.name in KEPT_OUT or draws.random() > filled:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        target: Any = getattr(message, field.name)
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth == 0:
                continue
            for _ in range(draws.choice((1, 1, 3)) if repeated else 1):
                inner = target.add() if repeated else target
                inner.SetInParent()
                _fill(inner, draws, filled, depth - 1)
        elif repeated:
            target.extend(_value(field, draws) for _ in range(draws.choice((1, 2, 50))))
        else:
            setattr(message, field.name, _value(field, draws))


def _value(field: Any, draws: random.Random) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = draws.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return draws.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draws.choice(REALS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return draws.choice([value.number for value in field.enum_type.values])
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return draws.choice(NUMBERS + NEGATIVE)
        case _:
            return draws.choice(NUMBERS)


def _tame(message: Message, draws: random.Random) -> Message:
    """Return a message that neither takes the model away nor runs for long."""
    match message:
        case inference_pb2.GenerateRequest():
            message.model = draws.choice((MODEL, MODEL, MODEL, message.model))
            if message.max_tokens > TOKENS_MAX or not message.HasField("max_tokens"):
                message.max_tokens = draws.choice((0, 1, TOKENS_MAX))
        case (
            inference_pb2.TokenizeRequest()
            | inference_pb2.DetokenizeRequest()
            | inference_pb2.EmbedRequest()
        ):
            message.model = draws.choice((MODEL, MODEL, message.model))
        case model_pb2.LoadModelRequest():
            message.validate_only = True
        case model_pb2.UnloadModelRequest():
            message.model = draws.choice(("", "x", "../demo", "*"))
        case _:
            pass
    return message


def _damage(body: bytes, draws: random.Random) -> bytes:
    """Return bytes that are a message no more, or another one."""
    damaged = bytearray(body or b"\x0a")
    for _ in range(draws.choice((1, 3, 20))):
        place = draws.randrange(len(damaged))
        match draws.randrange(3):
            case 0:
                damaged[place] = draws.randrange(256)
            case 1:
                damaged[place:place] = draws.randbytes(draws.choice((1, 8)))
            case _:
                del damaged[place + 1 :]
    return bytes(damaged)
