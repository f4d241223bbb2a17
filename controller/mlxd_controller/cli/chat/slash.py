"""Commands of a chat: each begins with a slash, and none of them ever reaches the model.

What begins with a slash and is no command is refused with a hint; a message that is to begin with
one has a blank before it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mlxd_controller.cli.chat import saved
from mlxd_controller.cli.chat.talk import Talk, read_variable
from mlxd_shared.domain.requests import SAMPLING_RANGES, WHOLE_OPTIONS

_N = TypeVar("_N", int, float)
_COMMAND = re.compile(r"/[A-Za-z?]\S*")
_FLAGS: Mapping[str, bool] = MappingProxyType({"stats": False, "wrap": True})
OPTIONS = frozenset({*SAMPLING_RANGES, *_FLAGS, "max_tokens"})
"""What `/set` knows by itself; every other name is a variable of the chat template."""
NOTHING = '""'


class Refused(Exception):
    """Why a command does nothing, for its user."""


class After(enum.Enum):
    """What a chat goes on with after a command."""

    PROMPT = "prompt"
    ANSWER = "answer"
    """The last message is to be answered anew."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has done: what to say, and what follows."""

    words: str = ""
    after: After = After.PROMPT


@dataclass(frozen=True, slots=True)
class _Command:
    usage: str
    help: str
    act: Callable[[Talk, str, Path], Done]


def is_command(text: str) -> bool:
    """Return whether a message is meant as a command."""
    return _COMMAND.match(text) is not None


def is_known(text: str) -> bool:
    """Return whether a message is a command that there is."""
    first = next(iter(text.split(maxsplit=1)), "")
    return is_command(text) and (first in COMMANDS or first in _OTHER_NAMES)


def perform(text: str, talk: Talk, folder: Path) -> Done:
    """Do what a command says, to `talk` and the chats in `folder`.

    Raises:
        Refused: it is none, or cannot be done.
    """
    word, _, rest = text.partition(" ") if " " in text else text.partition("\n")
    name = word.strip()
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        raise Refused(f"{name} {_hint(name)}")
    try:
        return command.act(talk, rest.strip(), folder)
    except saved.ChatNotUsable as error:
        raise Refused(str(error)) from error


def _hint(name: str) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake alone

    near = get_close_matches(name, [*COMMANDS, *_OTHER_NAMES], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"is no command: {meant}/help lists them; a blank before it makes it a message"


def _help(_talk: Talk, _rest: str, _folder: Path) -> Done:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    return Done("\n".join([*lines, *KEYS]))


def _end(_talk: Talk, _rest: str, _folder: Path) -> Done:
    return Done(after=After.END)


def _clear(talk: Talk, _rest: str, _folder: Path) -> Done:
    talk.messages.clear()
    return Done("the conversation is forgotten")


def _system(talk: Talk, rest: str, _folder: Path) -> Done:
    if not rest:
        return Done(f"system prompt: {talk.system}" if talk.system else "there is no system prompt")
    _need_template(talk)
    talk.system = "" if rest == NOTHING else rest
    return Done("the system prompt is changed" if talk.system else "there is no system prompt")


def _set(talk: Talk, rest: str, _folder: Path) -> Done:
    name, equals, value = rest.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
        raise Refused("write /set NAME=VALUE, such as /set temperature=0.5; without VALUE: unset")
    if name not in OPTIONS:
        return _set_variable(talk, name, value)
    if name == "max_tokens":
        talk.max_tokens = _number(name, value, int) if value else None
    elif name in _FLAGS:
        if value not in {"true", "false", ""}:
            raise Refused(f"{name} is true or false")
        setattr(talk, name, value == "true" if value else _FLAGS[name])
    else:
        kind: Callable[[str], float] = int if name in WHOLE_OPTIONS else float
        change: dict[str, Any] = {name: _number(name, value, kind) if value else None}
        talk.sampling = replace(talk.sampling, **change)
    return Done(f"{name} is {value or 'as the model has it'}")


def _set_variable(talk: Talk, name: str, value: str) -> Done:
    from difflib import get_close_matches  # noqa: PLC0415 - as above

    near = get_close_matches(name, OPTIONS, n=1, cutoff=0.8)
    if near and name not in talk.variables:
        raise Refused(f"{name}: did you mean {near[0]}?")
    _need_template(talk)
    if value:
        talk.variables[name] = read_variable(name, value)
        return Done(f"the template's variable {name} is {value}")
    talk.variables.pop(name, None)
    return Done(f"the template's variable {name} is not set")


def _need_template(talk: Talk) -> None:
    if not talk.chats:
        raise Refused(f"{talk.model} has no chat template, which alone would read that")


def _number(name: str, text: str, kind: Callable[[str], _N]) -> _N:
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise Refused(f"{name}: {text!r:.40} is no {what}") from None


def _show(talk: Talk, _rest: str, _folder: Path) -> Done:
    options = {
        name: value
        for name in sorted(OPTIONS - _FLAGS.keys() - {"max_tokens"})
        if (value := getattr(talk.sampling, name)) is not None
    }
    if talk.max_tokens is not None:
        options["max_tokens"] = talk.max_tokens
    pairs = [
        ("model", talk.model),
        ("system", talk.system or "-"),
        ("options", _pairs(options)),
        ("variables", _pairs(talk.variables)),
        ("tools", ", ".join(tool.name for tool in talk.tools) or "-"),
        *((name, str(getattr(talk, name)).lower()) for name in _FLAGS),
        ("messages", str(len(talk.messages))),
    ]
    return Done("\n".join(f"{name:<10} {value}" for name, value in pairs))


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "-"


def _save(talk: Talk, rest: str, folder: Path) -> Done:
    chat = saved.SavedChat(talk.model, talk.system, talk.variables, tuple(talk.messages))
    return Done(f"saved in {saved.save(folder, rest, chat)}")


def _load(talk: Talk, rest: str, folder: Path) -> Done:
    chat = saved.load(folder, rest)
    talk.system, talk.variables = chat.system, dict(chat.variables)
    talk.messages[:] = chat.messages
    other = f"; it was held with {chat.model}" if chat.model != talk.model else ""
    return Done(f"{len(chat.messages)} messages of {rest}{other}")


def _regenerate(talk: Talk, _rest: str, _folder: Path) -> Done:
    if not any(message.role == "user" for message in talk.messages):
        raise Refused("there is no message to answer anew")
    return Done(after=After.ANSWER)


KEYS = (
    '""" begins and ends a message of several lines, a final \\',
    "continues a line, pasted lines are one message. Ctrl-C stops",
    "an answer or clears what is typed, Ctrl-D ends the chat.",
)
COMMANDS: Mapping[str, _Command] = MappingProxyType(
    {
        "/help": _Command("/help", "shows this (also /?)", _help),
        "/system": _Command("/system [TEXT]", 'shows or sets the system prompt ("")', _system),
        "/set": _Command("/set NAME=VALUE", "an option, or a variable of the template", _set),
        "/show": _Command("/show", "shows what is in force", _show),
        "/save": _Command("/save NAME", "saves the conversation", _save),
        "/load": _Command("/load NAME", "goes on with a saved one", _load),
        "/clear": _Command("/clear", "forgets the conversation", _clear),
        "/regenerate": _Command("/regenerate", "answers the last message anew", _regenerate),
        "/bye": _Command("/bye", "ends the chat (also /exit, /quit)", _end),
    }
)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
)
