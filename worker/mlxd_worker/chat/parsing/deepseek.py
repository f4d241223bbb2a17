"""DeepSeek V3 and R1: calls with marks of their own, the arguments as JSON, fenced or bare."""

from __future__ import annotations

from typing import Final

from mlxd_shared.domain.chats import json_object
from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, make_call

_OPEN: Final = "<｜tool▁call▁begin｜>"  # noqa: RUF001 - the letter is the model's
_CLOSE: Final = "<｜tool▁call▁end｜>"  # noqa: RUF001 - the letter is the model's
_SEPARATOR: Final = "<｜tool▁sep｜>"  # noqa: RUF001 - the letter is the model's
_FENCE: Final = "```"


def _decode(body: str, _: Tools) -> list[Called] | None:
    before, *parts = body.split(_OPEN)
    calls = [_call(part) for part in parts]
    if before.strip() or not calls:
        return None
    good = [call for call in calls if call is not None]
    return good if len(good) == len(calls) else None


def _call(text: str) -> Called | None:
    inner, _, after = text.partition(_CLOSE)
    first, separator, second = inner.partition(_SEPARATOR)
    if after.strip() or not separator:
        return None
    name, fence, arguments = second.strip().partition(f"{_FENCE}json")
    if not fence or not arguments.endswith(_FENCE):
        name, arguments = first, second
    try:
        return make_call(name.strip(), json_object(arguments.removesuffix(_FENCE)))
    except ValueError:
        return None


SYNTAX = CallSyntax(
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001 - likewise
    "<｜tool▁calls▁end｜>",  # noqa: RUF001 - likewise
    _decode,
)
MARKS = (_OPEN, _CLOSE, _SEPARATOR)
