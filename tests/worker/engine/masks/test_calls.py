"""When a grammar of calls wakes, and when it sleeps again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_worker.chat.parsing.pieces import Begin
from mlxd_worker.constraints.calls.grammar import marks_of
from mlxd_worker.engine.masks.calls import CallMatcher
from tests.worker.constraints.dialects import Speech, load_speech, write_marked_model

CALL = '{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module", name="speech")
def made_speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    """Hermes, with reasoning, in a vocabulary of bytes and marks."""
    folder: Path = write_marked_model(tmp_path_factory.mktemp("marked"))
    return load_speech("hermes", folder)


def matcher_of(speech: Speech, begin: Begin | None = None, *, several: bool = True) -> CallMatcher:
    """Return a matcher at the beginning of an answer."""
    grammar = speech.constraints.compile(speech.format_of(several=several))
    marks = marks_of(speech.output, begin or Begin())
    return speech.constraints.watch(grammar, marks, ends=not several).start()


def spell(text: str) -> list[int]:
    """Return the ids of a text, byte by byte: no mark is a token."""
    known = {byte: index for index, byte in enumerate(sorted(_byte_chars()), start=3)}
    return [known[_byte_chars_of(byte)] for byte in text.encode()]


def _byte_chars() -> list[str]:
    return [_byte_chars_of(byte) for byte in range(256)]


def _byte_chars_of(byte: int) -> str:
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in own:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in own].index(byte))


def ids_of(speech: Speech, text: str) -> list[int]:
    """Return the ids of a text in which marks are tokens."""
    return speech.tokenizer.encode(text, begin_text=False, parse_special=True)


def follow(matcher: CallMatcher, ids: list[int]) -> None:
    """Have a matcher take tokens, all of which it allows."""
    for token_id in ids:
        assert matcher.try_accept(token_id)


def test_it_wakes_behind_a_mark_and_sleeps_behind_a_call(speech: Speech) -> None:
    """And so on with each call; where one ends the answer, it does not sleep."""
    matcher = matcher_of(speech)
    for _ in range(2):
        follow(matcher, ids_of(speech, "Hm. "))
        assert not matcher.is_awake
        follow(matcher, ids_of(speech, "<tool_call>"))
        assert matcher.is_awake
        follow(matcher, ids_of(speech, CALL))
        assert not matcher.is_awake
        assert not matcher.is_over

    last = matcher_of(speech, several=False)
    follow(last, ids_of(speech, f"<tool_call>{CALL}"))
    assert last.is_over


def test_a_mark_may_be_spell(speech: Speech) -> None:
    """Letter by letter it is a mark, too, and is seen to come."""
    matcher = matcher_of(speech)
    follow(matcher, spell("a <tool"))
    assert matcher.may_wake
    follow(matcher, spell("s>"))
    assert not matcher.may_wake
    follow(matcher, spell("<tool_call>"))
    assert matcher.is_awake
    assert not matcher.try_accept(spell("x")[0])


@pytest.mark.parametrize(("begin", "text"), [
    (Begin(), "<think>a <tool_call>"),
    (Begin(), "\n<think>a <tool_call>"),
    (Begin(reasoning=True), "a <tool_call>"),
])  # fmt: skip
def test_reasoning_holds_no_call(speech: Speech, begin: Begin, text: str) -> None:
    """A mark in it is text; behind it, one is a mark."""
    matcher = matcher_of(speech, begin)
    follow(matcher, ids_of(speech, text))
    assert not matcher.is_awake
    follow(matcher, ids_of(speech, "</think>b<tool_call>"))
    assert matcher.is_awake


def test_what_is_no_beginning_of_reasoning_is_text(speech: Speech) -> None:
    """The mark of reasoning begins it at an answer's start alone."""
    for begin, text in ((Begin(), "a<think>"), (Begin(middle=True), "<think>")):
        matcher = matcher_of(speech, begin)
        follow(matcher, ids_of(speech, f"{text}<tool_call>"))
        assert matcher.is_awake


def test_more_than_a_mark_in_a_token_has_to_go_on_like_a_call(speech: Speech) -> None:
    """The token `>` and a line's end does; before what cannot follow, it stays asleep."""
    good = matcher_of(speech)
    (more,) = ids_of(speech, ">\n")
    follow(good, spell("<tool_call"))
    good.see(more)
    assert good.has_rest
    assert good.mask()
    assert good.is_awake
    follow(good, spell("{"))

    bad = matcher_of(speech)
    (wrong,) = ids_of(speech, ">x")
    follow(bad, spell("<tool_call"))
    bad.see(wrong)
    assert bad.has_rest
    assert not bad.mask()
    assert not bad.is_awake
