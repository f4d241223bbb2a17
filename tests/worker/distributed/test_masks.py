"""What ranks that follow know of constraints: where the first rank's matchers are, step by step."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.chat.parsing.pieces import Begin
from mlxd_worker.constraints.calls.grammar import marks_of
from mlxd_worker.distributed.formats import constraint_of, constraint_values
from mlxd_worker.distributed.frames import WireBroken
from mlxd_worker.distributed.masks import HeardMasks, SentMasks, pack_masks, read_masks
from mlxd_worker.engine.masks.advance import Advance, Follower, Grammar, Standing
from mlxd_worker.engine.masks.calls import CallConstraint, CallMatcher
from tests.worker.constraints.dialects import Speech, load_speech, write_marked_model

LIST = '{"type": "array", "items": {"type": "string"}, "minItems": 1}'
CALL = '{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module", name="speech")
def made_speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    """A model that calls in Hermes' form, and reasons; its vocabulary is bytes and marks."""
    folder: Path = write_marked_model(tmp_path_factory.mktemp("marked"))
    return load_speech("hermes", folder)


@pytest.fixture(scope="module", name="listing")
def compiled_list(speech: Speech) -> Grammar:
    """A list of short texts."""
    return speech.constraints.compile(ResponseFormat(FormatKind.JSON_SCHEMA, LIST))


def watch(speech: Speech, *, several: bool = True) -> CallConstraint:
    """Return a grammar that sleeps until a call begins."""
    grammar = speech.constraints.compile(speech.format_of(several=several))
    return speech.constraints.watch(grammar, marks_of(speech.output, Begin()), ends=not several)


def follower_of(speech: Speech, constraint: Grammar | CallConstraint) -> Follower:
    """Return what a follower starts from, once the constraint has been on the wire."""
    values = json.loads(json.dumps(constraint_values(constraint)))
    other = constraint_of(values, speech.constraints)
    assert other is not None
    return other.start()


class Pair:
    """A row's matcher on the first rank, and on another one."""

    def __init__(self, speech: Speech, constraint: Grammar | CallConstraint) -> None:
        self.first = constraint.start()
        self.other = follower_of(speech, constraint)
        self.bodies: list[bytes] = []
        self._masks = WeakKeyDictionary[Follower, bytes]()
        self.assert_same()

    def assert_same(self) -> None:
        """Assert that both are at one place."""
        assert self.first.place() == self.other.place()
        assert self.first.is_awake == self.other.is_awake
        assert self.first.may_wake == self.other.may_wake

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Have the first go on, and tell the other; return what that one has of it."""
        work, theirs = Advance(self.first, tokens), Advance(self.other, tokens)
        work.perform(lambda: 0.0)
        work.done = True
        work.look(0.0)
        self.bodies.append(pack_masks([work], self._masks))
        read_masks(self.bodies[-1], [theirs])
        assert theirs.seen == work.seen
        return theirs

    def draw(self, token_id: int) -> None:
        """Take a drawn token, as a row does."""
        if self.first.is_awake:
            assert self.first.mask()[token_id >> 3] >> (token_id & 7) & 1
            self.advance((token_id,))
        else:
            assert isinstance(self.first, CallMatcher)
            assert isinstance(self.other, CallMatcher)
            for matcher in (self.first, self.other):
                matcher.see(token_id)
            assert self.first.has_rest == self.other.has_rest
            if self.first.has_rest:
                self.advance(())
        self.assert_same()


def ids_of(speech: Speech, text: str) -> list[int]:
    """Return the ids of a text in which marks are tokens."""
    return speech.tokenizer.encode(text, begin_text=False, parse_special=True)


def spell(speech: Speech, text: str) -> list[int]:
    """Return the ids of a text, letter by letter."""
    return [token_id for letter in text for token_id in ids_of(speech, letter)]


def test_a_format_is_told_mask_by_mask(speech: Speech, listing: Grammar) -> None:
    """To its end; of masks that stay as they were, as within a text, only that."""
    pair = Pair(speech, listing)
    for token_id in spell(speech, '["abc", "d"]'):
        pair.draw(token_id)
    sizes = [len(body) for body in pair.bodies]
    mask_nbytes = len(listing.first_mask)
    assert max(sizes) >= mask_nbytes
    assert min(sizes[:-1]) < mask_nbytes // 2  # behind the last one nothing is drawn
    end = Advance(pair.other, ())
    read_masks(pair.bodies[-1], [end])
    assert end.seen.over_after == 1


def test_an_output_that_is_over_is_told_with_its_mask(speech: Speech) -> None:
    """A stream that may not end yet is drawn from it, everywhere; where there is none, it fails."""
    word = speech.constraints.compile(ResponseFormat(FormatKind.REGEX, "a"))
    bodies: list[bytes] = []
    sent, heard = SentMasks(1, bodies.append), HeardMasks(lambda: bodies.pop(0))
    for broken in (False, True):
        held = replace(word, stream_s=-1.0) if broken else word
        work = Advance(held.start(), tuple(spell(speech, "a")))
        theirs = Advance(follower_of(speech, word), work.tokens)
        work.perform(lambda: 0.0)
        work.done = True
        sent.wait([work], 0.0)
        heard.wait([theirs], 0.0)
        assert theirs.seen.over_after == work.seen.over_after == 1
        for each in (work, theirs):
            each.check()
            if broken:
                with pytest.raises(InvalidRequest):
                    each.check_mask()
            else:
                each.check_mask()
                assert each.matcher.mask() == work.matcher.mask()


@pytest.mark.parametrize("several", [True, False])
def test_calls_are_noticed_alike(speech: Speech, *, several: bool) -> None:
    """Through reasoning, marks in one token and in many, what begins like a mark, and calls."""
    pair = Pair(speech, watch(speech, several=several))
    for token_id in ids_of(speech, " <think>a <tool_call></think>b <tool"):
        pair.draw(token_id)
    assert pair.other.may_wake
    for text in (spell(speech, "x <tool_call>"), ids_of(speech, CALL)):
        for token_id in text:
            pair.draw(token_id)
    if several:
        (more,) = ids_of(speech, ">\n")
        for token_id in [*spell(speech, "<tool_call"), more, *spell(speech, '{"name')]:
            pair.draw(token_id)
        assert pair.other.is_awake


def test_a_resumed_stream_is_told_where_it_stands(speech: Speech) -> None:
    """After tokens in which calls began and ended, and of which the other has seen none."""
    for text in ("a<tool_call>" + CALL + " <tool", "<think>b", CALL[:3], f"<tool_call>{CALL[:9]}"):
        pair = Pair(speech, watch(speech))
        pair.advance(tuple(ids_of(speech, text)))
        pair.assert_same()


@pytest.mark.parametrize(
    ("seen", "judge", "failed"),
    [
        (Standing(late=True), Advance.check, "exceed 10 s"),
        (Standing(late=True, arrived=True), Advance.check, ""),
        (Standing(late=True, arrived=True), Advance.check_mask, "exceed 10 s"),
        (Standing(arrived=True, done=True, error=ValueError()), Advance.check, "first rank"),
        (Standing(arrived=True, done=True, mask_error=ValueError()), Advance.check, ""),
        (Standing(arrived=True, done=True, mask_error=ValueError()), Advance.check_mask, "first"),
    ],
)
def test_what_fails_there_fails_here(
    speech: Speech,
    listing: Grammar,
    seen: Standing,
    judge: Callable[[Advance], None],
    failed: str,
) -> None:
    """Late, not to be followed, or not to be drawn from; the row alone, with its format's field."""
    work = Advance(listing.start(), (1,), seen=seen)
    theirs = Advance(follower_of(speech, listing), (1,))
    read_masks(pack_masks([work], WeakKeyDictionary()), [theirs])
    assert (theirs.seen.late, theirs.seen.arrived) == (seen.late, seen.arrived)
    if not failed:
        judge(theirs)
        return
    with pytest.raises(InvalidRequest, match=failed) as caught:
        judge(theirs)
    assert caught.value.violations[0].field == "response_format.json_schema"


@pytest.mark.parametrize(
    "body", [b"", b"\0" * 9, b"\0" * 11, struct.pack(">HIII", 32 | 64, 0, 0, 9)]
)
def test_what_is_not_of_the_rows_breaks_the_wire(
    speech: Speech, listing: Grammar, body: bytes
) -> None:
    """Too short for its rows or a mask, or longer."""
    with pytest.raises(WireBroken, match="MASKS"):
        read_masks(body, [Advance(follower_of(speech, listing), (1,))])


def test_a_step_tells_what_it_sees(speech: Speech, listing: Grammar) -> None:
    """The threads' work as it is then, once a step; a follower does no work of its own."""
    bodies: list[bytes] = []
    sent, heard = SentMasks(1, bodies.append), HeardMasks(lambda: bodies.pop(0))
    (opening,) = spell(speech, "[")
    work = Advance(listing.start(), (opening,))
    theirs = Advance(follower_of(speech, listing), (opening,))
    sent.begin(work)
    heard.begin(theirs)
    while not theirs.seen.done:
        sent.wait_for_any([work])
        heard.wait_for_any([theirs])
        sent.wait([work], 0.0)
        assert len(bodies) == 1
        heard.wait([theirs], 0.0)
    assert not theirs.done
    assert theirs.matcher.mask() == work.matcher.mask() != listing.first_mask
