"""The rules: what agents change at the head of their prompts goes behind what stays. Pure.

A prompt is read from where it first differs from one that was read before. So each rule puts what
changes behind what does not, or leaves out what is not for a model.

Invariants:
- What a conversation becomes depends on that conversation alone, so that a turn appended to it
  changes nothing in front of what the rules put at its end.
- No text is lost but what `BILLING_HEADER` recognises; the marks of reminders are added.
- Rules applied again change nothing; a conversation that none recognises stays the same object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxd import Chat, ChatMessage
from mlxd_gateway.agents import heads
from mlxd_gateway.agents.reminders import is_reminder, join, remind

OF_SYSTEM = ("system", "developer")
KEPT_THINKING = {"clear_thinking": False, "preserve_thinking": True}
"""What templates call it that reasoning of earlier turns stays; each knows one of them, or none."""
EFFORT, DEFAULT_EFFORT = "reasoning_effort", "high"
Placed = tuple[ChatMessage, str]
"""A message, and the request's field that it comes from."""
Change = Callable[[Sequence[Placed]], Sequence[Placed]]
Vary = Callable[[Chat], Chat]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; `recognises` and `does` are its row in docs/http.md."""

    name: str
    recognises: str
    does: str
    change: Change | None = None
    """What becomes of the messages; None: they stay."""
    vary: Vary | None = None
    """What becomes of the template's variables; None: they stay."""


def apply_rules(
    rules: Sequence[Rule], chat: Chat, places: Sequence[str]
) -> tuple[Chat, tuple[str, ...]]:
    """Return the conversation as the rules leave it, and the request's field of each message.

    places: of each message; where one lacks it is `messages[INDEX]`.
    """
    names = [*places, *(f"messages[{i}]" for i in range(len(places), len(chat.messages)))]
    placed: Sequence[Placed] = list(zip(chat.messages, names, strict=False))
    for rule in rules:
        if rule.change is not None:
            placed = rule.change(placed)
        if rule.vary is not None:
            chat = rule.vary(chat)
    messages = tuple(message for message, _ in placed)
    if messages != chat.messages:
        chat = replace(chat, messages=messages)
    return chat, tuple(place for _, place in placed)


def _keep_thinking(chat: Chat) -> Chat:
    """Return a chat whose template keeps reasoning, unless the request says something of that."""
    sent = _variables_of(chat) if chat.tools_json else None
    if sent is None or not KEPT_THINKING.keys().isdisjoint(sent):
        return chat
    return replace(chat, variables_json=json.dumps({**sent, **KEPT_THINKING}))


def _leave_effort(chat: Chat) -> Chat:
    """Return a chat that leaves the effort to the model, where it is what the API has anyway."""
    sent = _variables_of(chat)
    if sent is None or sent.get(EFFORT) != DEFAULT_EFFORT:
        return chat
    rest = {name: value for name, value in sent.items() if name != EFFORT}
    return replace(chat, variables_json=json.dumps(rest) if rest else "")


def _variables_of(chat: Chat) -> dict[str, Any] | None:
    """Return the template's variables; None where who reads them will say what is wrong."""
    try:
        sent = json.loads(chat.variables_json or "{}")
    except (ValueError, RecursionError):
        return None
    return sent if isinstance(sent, dict) else None


def _join_head(placed: Sequence[Placed]) -> Sequence[Placed]:
    """Have what the system says at the beginning be one message, under the role that all know."""
    head = placed[: _head_length(placed)]
    if not head or any(message.parts for message, _ in head):
        return placed
    if len(head) == 1 and head[0][0].role == OF_SYSTEM[0]:
        return placed
    (first, place), *others = head
    content = join(first.content, *(message.content for message, _ in others))
    return [(replace(first, role=OF_SYSTEM[0], content=content), place), *placed[len(head) :]]


@dataclass(slots=True)
class _Run:
    """A message, and texts that are to follow its own; joined once, however many they are."""

    message: ChatMessage
    place: str
    texts: list[str] = field(default_factory=list)
    is_reminder: bool = False
    """Whether it is a user's that was made here; the user's own words join it."""

    def close(self) -> Placed:
        """Return it as one message."""
        if not self.texts:
            return self.message, self.place
        return _extend((self.message, self.place), *self.texts)


def _keep_in_place(placed: Sequence[Placed]) -> Sequence[Placed]:
    """Have what the system says in the middle be said there, whatever the template does with it."""
    head = _head_length(placed)
    runs: list[_Run] = []
    for message, place in placed[head:]:
        if message.role in OF_SYSTEM and not message.parts:
            if not _takes_text(runs[-1].message):
                runs.append(_Run(ChatMessage("user"), place, is_reminder=True))
            runs[-1].texts.append(remind(message.content) if message.content else "")
        elif runs and runs[-1].is_reminder and _is_plain_user(message):
            runs[-1].message, runs[-1].is_reminder = replace(message, content=""), False
            runs[-1].texts.append(message.content)
        else:
            runs.append(_Run(message, place))
    return [*placed[:head], *(run.close() for run in runs)]


def _join_to_tools(placed: Sequence[Placed]) -> Sequence[Placed]:
    """Have reminders behind a tool's answer be part of it: no user asks anything there."""
    runs: list[_Run] = []
    for message, place in placed:
        follows_tool = bool(runs) and runs[-1].message.role == "tool" and not runs[-1].message.parts
        if follows_tool and _is_plain_user(message) and is_reminder(message.content):
            runs[-1].texts.append(message.content)
        else:
            runs.append(_Run(message, place))
    return [run.close() for run in runs]


def _leave_out(form: re.Pattern[str]) -> Change:
    """Return what takes the first lines of the head away where they are of a form."""

    def change(placed: Sequence[Placed]) -> Sequence[Placed]:
        head = _searched_length(placed)
        kept: list[Placed] = []
        for message, place in placed[:head]:
            text = heads.drop_first_lines(message.content, form)
            if text or not message.content:
                kept.append((_with_content(message, text), place))
        kept += placed[head:]
        return kept or placed

    return change


def _move(form: re.Pattern[str], find: Callable[[Sequence[Placed]], int | None]) -> Change:
    """Return what moves lines of the head to the message that `find` names, as a reminder.

    They go in front of the first message's own words, and behind the last one's.
    """

    def change(placed: Sequence[Placed]) -> Sequence[Placed]:
        goal = find(placed)
        if goal is None:
            return placed
        head = _searched_length(placed)
        kept: list[Placed] = []
        lines: list[str] = []
        for message, place in placed[:head]:
            rest, taken = heads.take_lines(message.content, form)
            lines += taken
            if rest or not taken:
                kept.append((_with_content(message, rest), place))
        if not lines:
            return placed
        kept += placed[head:]
        goal -= len(placed) - len(kept)
        message, place = kept[goal]
        reminder = remind("\n".join(lines))
        if find is _find_first_user:
            kept[goal] = (replace(message, content=join(reminder, message.content)), place)
        else:
            kept[goal] = _extend(kept[goal], reminder)
        return kept

    return change


def _find_first_user(placed: Sequence[Placed]) -> int | None:
    """Return the index of the first user's message behind the head."""
    head = _head_length(placed)
    users = (i for i, (message, _) in enumerate(placed) if i >= head and _is_plain_user(message))
    return next(users, None)


def _find_last(placed: Sequence[Placed]) -> int | None:
    """Return the index of the last message, if what is said there may be followed by more."""
    head = _head_length(placed)
    takes = len(placed) > head and _takes_text(placed[-1][0])
    return len(placed) - 1 if takes else None


def _head_length(placed: Sequence[Placed]) -> int:
    """Return with how many messages of the system a conversation begins."""
    others = (i for i, (message, _) in enumerate(placed) if message.role not in OF_SYSTEM)
    return next(others, len(placed))


def _searched_length(placed: Sequence[Placed]) -> int:
    """Return how much of the head is looked through: all of it, or nothing where it is long."""
    head = _head_length(placed)
    chars = sum(len(message.content) for message, _ in placed[:head])
    return head if chars <= heads.HEAD_CHARS_MAX else 0


def _takes_text(message: ChatMessage) -> bool:
    return message.role in ("user", "tool") and not message.parts


def _is_plain_user(message: ChatMessage) -> bool:
    return message.role == "user" and not message.parts


def _extend(placed: Placed, *texts: str) -> Placed:
    message, place = placed
    return replace(message, content=join(message.content, *texts)), place


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    return message if content == message.content else replace(message, content=content)


LATE_SYSTEM = Rule(
    "late-system",
    "a `system` message behind the first message of another role (Anthropic's API alone)",
    "becomes a `<system-reminder>` at the end of the message before it: templates move such"
    " messages to the head, or refuse them",
    _keep_in_place,
)
BILLING_HEADER = Rule(
    "billing-header",
    "a first line `x-anthropic-billing-header: NAME=VALUE; …` of the system's text",
    "is left out: it is another with every request, and not for the model",
    _leave_out(heads.BILLING),
)
DATE = Rule(
    "date",
    "a line `Today's date: DATE`, `Current date: DATE` or with `is`, in the system's text",
    "goes in front of the first user's words: system and tools stay equal from day to day",
    _move(heads.DATE, _find_first_user),
)
CLOCK = Rule(
    "clock",
    "a line `Current time: TIME` or `Current date and time: DATE TIME`, or with `is`, there",
    "goes behind the last message",
    _move(heads.CLOCK, _find_last),
)
TOKENS_LEFT = Rule(
    "tokens-left",
    "a line `<total_tokens>N tokens left</total_tokens>` in the system's text",
    "goes behind the last message",
    _move(heads.TOKENS_LEFT, _find_last),
)
REMINDERS = Rule(
    "reminders",
    "a user's message that is nothing but `<system-reminder>`s, right behind a tool's answer",
    "becomes the end of that answer: as a question of the user's it would have templates drop the"
    " reasoning before it",
    _join_to_tools,
)
KEEP_THINKING = Rule(
    "keep-thinking",
    "tools on offer, and neither `clear_thinking` nor `preserve_thinking` among the template's"
    " variables",
    "sets `clear_thinking` to false and `preserve_thinking` to true, for templates that would drop"
    " the reasoning of earlier turns",
    vary=_keep_thinking,
)
ONE_HEAD = Rule(
    "one-head",
    "several messages of role `system` or `developer` that a conversation begins with, or one of"
    " role `developer`",
    "become one message of role `system`: many templates refuse a second one, or the role"
    " `developer`",
    _join_head,
)
EFFORT_RULE = Rule(
    "default-effort",
    "an `effort` of `high`, which is that API's default (Anthropic's API alone)",
    "is left to the model: Claude Code sends it always, and templates that know efforts by other"
    " names refuse it",
    vary=_leave_effort,
)
OF_ANY_API = (DATE, CLOCK, TOKENS_LEFT, BILLING_HEADER, REMINDERS, KEEP_THINKING, ONE_HEAD)
"""In the order in which they apply: what one leaves, no rule before it would have recognised."""
OF_ANTHROPIC = (LATE_SYSTEM, EFFORT_RULE, *OF_ANY_API)
