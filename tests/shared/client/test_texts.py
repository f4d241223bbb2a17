"""No text that a caller can give the client fails in the wire's own words.

What there is to give is read from the client's signatures: whoever adds a parameter adds its tests.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from mlxd import Client, Stream
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving

HALF = "a\ud800"
SAID = "half a character (a lone surrogate) at character 1"
SEQUENCE, UNION, RECORD, OTHER = range(4)


def form_of(wanted: Any) -> tuple[int, tuple[Any, ...]]:
    """Tell a sequence, a union and a dataclass apart; return what types they are made of."""
    made_of = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return UNION, made_of
    if made_of:
        varying = tuple(each for each in made_of if each is not Ellipsis)
        assert len(varying) == 1 or str not in varying, f"this walk knows no {wanted}"
        return SEQUENCE, varying[:1]
    return (RECORD if dataclasses.is_dataclass(wanted) else OTHER), ()


def sample(wanted: Any) -> Any:
    """Return some value of a type."""
    form, made_of = form_of(wanted)
    if form in {SEQUENCE, UNION}:
        return (sample(made_of[0]),) if form == SEQUENCE else sample(made_of[0])
    if form == RECORD:
        hints = typing.get_type_hints(wanted)
        absent = dataclasses.MISSING
        needed = [each.name for each in dataclasses.fields(wanted) if each.default is absent]
        return wanted(**{name: sample(hints[name]) for name in needed})
    return next(iter(wanted)) if issubclass(wanted, enum.Enum) else wanted("1")


def breaks(wanted: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each place of a type that holds text, and values with half a character there.

    More than one where an enumeration beside it may say that the text is not looked at.
    """
    form, made_of = form_of(wanted)
    if wanted is str:
        yield "", [HALF]
    elif form == RECORD:
        hints = typing.get_type_hints(wanted)
        kinds = [
            [(name, member) for member in hint]
            for name, hint in hints.items()
            if inspect.isclass(hint) and issubclass(hint, enum.Enum)
        ]
        for name, hint in hints.items():
            for place, values in breaks(hint):
                yield (
                    f".{name}{place}",
                    [
                        dataclasses.replace(sample(wanted), **dict(chosen) | {name: value})
                        for value in values
                        for chosen in itertools.product(*kinds)
                    ],
                )
    for each in made_of:
        for place, values in breaks(each):
            behind: list[Any] = [(sample(each), value) for value in values]
            yield place, behind if form == SEQUENCE else values


def parameters_of(method: Any) -> dict[str, Any]:
    """Return the types of a method's parameters, those of a completion's options one by one."""
    hints = typing.get_type_hints(method)
    del hints["return"]
    for each in filter(typing.is_typeddict, typing.get_args(hints.get("options"))):
        del hints["options"]
        hints |= typing.get_type_hints(each)
    return hints


PLACES = [
    pytest.param(name, parameter, values, id=f"{name}-{parameter}{place}")
    for name, method in inspect.getmembers(Client, inspect.isfunction)
    if name == "__init__" or not name.startswith("_")
    for parameter, wanted in parameters_of(method).items()
    for place, values in breaks(wanted)
]


def arguments_for(method: Any, parameter: str, value: Any) -> dict[str, Any]:
    """Return arguments for a call: one value, and whatever else it cannot do without."""
    return {
        name: sample(parameters_of(method)[name])
        for name, each in inspect.signature(method).parameters.items()
        if name != "self" and each.default is each.empty and each.kind is not each.VAR_KEYWORD
    } | {parameter: value}


async def refusals(client: Client, method: str, parameter: str, value: Any) -> list[FieldViolation]:
    """Call a method; return what it refuses, nothing where it runs."""
    bound = Client if method == "__init__" else getattr(client, method)
    try:
        result = bound(**arguments_for(getattr(Client, method), parameter, value))
        if inspect.isawaitable(result):
            await result
        elif isinstance(result, Stream):
            await result.aclose()
    except InvalidRequest as error:
        return list(error.violations)
    return []


@pytest.mark.asyncio
@pytest.mark.parametrize(("method", "parameter", "values"), PLACES)
async def test_half_a_character_is_refused_by_field(
    method: str, parameter: str, values: list[Any]
) -> None:
    """Each text of each parameter, however deep it lies, is refused before anything is sent."""
    async with serving(Answers(generate=replies.story())) as fake, Client(fake.address) as client:
        said = [await refusals(client, method, parameter, value) for value in values]

    refused = [violations for violations in said if violations]
    assert refused
    assert len(fake.requests) <= len(said) - len(refused)
    fields = {"prompt": ("text", "chat.")}.get(parameter, (parameter,))
    for [violation] in refused:
        assert violation.description == SAID
        assert violation.field.startswith(fields)


def test_the_walk_finds_the_texts() -> None:
    """It would be a poor proof that finds none of the old ones."""
    ids = {case.id for case in PLACES}

    assert ids >= {
        "__init__-address",
        "embed-texts",
        "forget-name",
        "generate-prompt",
        "generate-prompt.messages.tool_calls.arguments_json",
        "generate-prompt.tools_json",
        "generate-request_id",
        "generate-response_format.choices",
        "generate-stop",
        "healthy-service",
        "load-name",
        "watch_models-model",
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("interval_s", [math.nan, 1e300])
async def test_an_interval_that_is_none_is_refused_by_field(interval_s: float) -> None:
    """What no duration holds is told as every other number."""
    async with serving(Answers()) as fake, Client(fake.address) as client:
        with pytest.raises(InvalidRequest, match="interval"):
            client.watch_status(interval_s=interval_s)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "option"), [("generate", "text"), ("embed", "texts_"), ("scores", "logprobs")]
)
async def test_an_option_that_there_is_not_is_an_error_of_type(method: str, option: str) -> None:
    """As of every Python function, also where the wire's message has a field of that name."""

    async def call(client: Any) -> None:
        options: dict[str, Any] = {option: "x"}
        result = getattr(client, method)(("x",), **options)
        if inspect.isawaitable(result):
            await result

    async with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=option):
            await call(client)
