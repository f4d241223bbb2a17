"""Chats made from stories: who asks for what, and which passage is the answer.

Invariants: everything follows from the generator that is handed in; no request and no passage
of a chat names anybody whom a held-out request may name; the people asked for are mostly given
new names, the same in request and answer, so that what is learnt is to look at the request; and
an answer names whom its request names soon, and nobody before.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from demo_training.chats import wordings
from demo_training.chats.passages import Passage, paragraph_starts, passage_at, shorten
from demo_training.chats.people import Namer, rename
from demo_training.chats.small_talk import TALKS

Turns = tuple[tuple[str, str], ...]
"""Role and content of each turn."""

CHARS_PER_CHAT = 250
"""A story tries to give one chat for so many characters of its text."""
NAMED_CHARS = 40
"""Somebody who is asked for is named within so many characters of a passage."""
OPENING_CHARS = 140
"""A thing that is asked for is, within so many."""
SHORT_SHARE = 0.6
SHORT_CHARS = (160, 300)
LONG_CHARS = (300, 800)
"""Characters of a first answer, before it goes on to where its text may end."""
RENAMED_SHARE = 0.95
SYSTEM_SHARE = 0.15
SMALL_TALK_SHARE = 0.03

_KINDS = ("somebody", "thing", "any", "continue")
_KIND_SHARES = (0.78, 0.12, 0.05, 0.05)
_SECOND_TURNS = ("none", "go on", "shorter", "another", "talk")
_SECOND_SHARES = (0.53, 0.14, 0.09, 0.19, 0.05)
_OPENER_SHARE = 0.25
_CLOSER_SHARE = 0.15
_THINGS = frozenset(wordings.BEASTS + wordings.FIGURES + wordings.PLACES + wordings.THINGS)
_THING = re.compile(r"\b(?:" + "|".join(sorted(_THINGS)) + r")\b")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the people whom its requests name."""

    turns: Turns
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """What a request is about: a name, or a thing in the wording's form; or nothing named."""

    needed: str
    wording: str
    is_somebody: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A story, who is in it, and where passages may begin: anywhere, and by who is named first."""

    text: str
    people: tuple[str, ...]
    starts: tuple[int, ...]
    starts_by_name: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, text: str, people: tuple[str, ...]) -> Self:
        """Look for the places in a story."""
        starts = tuple(paragraph_starts(text))
        anybody = re.compile(rf"\b(?:{'|'.join(map(re.escape, people)) or '(?!)'})\b")
        by_name: dict[str, list[int]] = {name: [] for name in people}
        for start in starts:
            first = anybody.search(text[start : start + NAMED_CHARS + 1])
            if first is not None and first.end() <= NAMED_CHARS:
                by_name[first.group()].append(start)
        here = tuple(name for name in people if by_name[name])
        return cls(text, here, starts, {name: tuple(by_name[name]) for name in here})


@dataclass(frozen=True, slots=True)
class ChatMaker:
    """Makes chats of stories."""

    namer: Namer
    held_out: re.Pattern[str]

    @classmethod
    def of(cls, namer: Namer) -> Self:
        """Make one that leaves out whom the namer leaves out."""
        alternatives = "|".join(map(re.escape, sorted(namer.held_out))) or r"(?!)"
        return cls(namer, re.compile(rf"\b(?:{alternatives})\b"))

    def chats(self, source: Source, rng: np.random.Generator) -> Iterator[Chat]:
        """Yield a story's chats, with small talk among them."""
        for _ in range(max(1, len(source.text) // CHARS_PER_CHAT)):
            if rng.random() < SMALL_TALK_SHARE:
                yield Chat(_with_system(_small_talk(rng), rng))
                continue
            chat = self._chat(source, str(rng.choice(_KINDS, p=_KIND_SHARES)), rng)
            if chat is not None:
                yield Chat(_with_system(chat.turns, rng), chat.subjects)

    def _chat(self, source: Source, kind: str, rng: np.random.Generator) -> Chat | None:
        place = _place(source, kind, rng)
        if place is None:
            return None
        start, subject = place
        passage = passage_at(source.text, start, _length(rng))
        if passage is None:
            return None
        if kind == "continue":
            return self._rename(_continuation(passage.text, rng), (), rng)
        turns = [("user", _request(subject, rng)), ("assistant", passage.text)]
        turns, other = _with_second(source, passage, subject, turns, rng)
        subjects = [each for each in (subject, other) if each is not None and each.is_somebody]
        return self._rename(turns, subjects, rng)

    def _rename(
        self, turns: list[tuple[str, str]], people: Sequence[Subject], rng: np.random.Generator
    ) -> Chat:
        """Return the turns with new names: mostly for whom they ask, always for a held-out one."""
        whole = "\n".join(content for _, content in turns)
        subjects = [who.needed for who in people]
        old = set(self.held_out.findall(whole))
        old |= {name for name in subjects if rng.random() < RENAMED_SHARE}
        for name in sorted(old):
            new = self.namer.draw(rng, "\n".join(content for _, content in turns))
            turns = [(role, rename(content, name, new)) for role, content in turns]
            subjects = [new if who == name else who for who in subjects]
        return Chat(tuple(turns), tuple(subjects))


def _place(
    source: Source, kind: str, rng: np.random.Generator
) -> tuple[int, Subject | None] | None:
    """Return where a passage may begin, and what a request for it would be about."""
    if not source.starts:
        return None
    if kind in ("any", "continue"):
        of_start = kind == "any" and rng.random() < 0.5
        return source.starts[0 if of_start else int(rng.integers(len(source.starts)))], None
    if kind == "somebody":
        if not source.people:
            return None
        weights = 1 / np.arange(1, len(source.people) + 1)
        name = source.people[int(rng.choice(len(weights), p=weights / weights.sum()))]
        places = source.starts_by_name[name]
        return places[int(rng.integers(len(places)))], Subject(name, name, is_somebody=True)
    for start in rng.choice(source.starts, size=12):
        match = _THING.search(source.text, int(start), int(start) + OPENING_CHARS)
        if match is not None:
            return int(start), Subject(match.group(), _with_article(match.group(), rng))
    return None


def _with_second(
    source: Source,
    passage: Passage,
    subject: Subject | None,
    turns: list[tuple[str, str]],
    rng: np.random.Generator,
) -> tuple[list[tuple[str, str]], Subject | None]:
    """Return the turns and perhaps a second request, with what that one newly asks for."""
    second = str(rng.choice(_SECOND_TURNS, p=_SECOND_SHARES))
    if second == "go on":
        left = source.text[passage.end :]
        start = passage.end + len(left) - len(left.lstrip())
        more = passage_at(source.text, start, int(rng.integers(200, 500)))
        if more is not None:
            return [*turns, ("user", _one(wordings.GO_ON, rng)), ("assistant", more.text)], None
    elif second == "shorter":
        short = shorten(passage.text, subject.needed if subject else "")
        if short is not None and subject is not None and rng.random() < 0.4:
            request = _one(wordings.SHORT, rng).format(x=subject.wording)
            return [("user", request), ("assistant", short)], None
        if short is not None:
            return [*turns, ("user", _one(wordings.SHORTER, rng)), ("assistant", short)], None
    elif second == "another":
        place = _place(source, str(rng.choice(("somebody", "somebody", "thing"))), rng)
        if place is not None and place[1] is not None:
            more = passage_at(source.text, place[0], int(rng.integers(200, 500)))
            request = _one(wordings.ANOTHER, rng).format(x=place[1].wording)
            if more is not None:
                return [*turns, ("user", request), ("assistant", more.text)], place[1]
    elif second == "talk":
        talk = TALKS[int(rng.integers(len(TALKS)))]
        remark, reply = _one(talk.remarks, rng), _one(talk.replies, rng)
        return [*turns, ("user", remark), ("assistant", reply)], None
    return turns, None


def _request(subject: Subject | None, rng: np.random.Generator) -> str:
    if subject is None:
        return _one(wordings.ANY_STORY, rng)
    choices: Sequence[str] = wordings.ABOUT
    if subject.is_somebody and rng.random() < 0.4:
        choices = wordings.ABOUT_SOMEBODY
    opener = _one(wordings.OPENERS, rng) if rng.random() < _OPENER_SHARE else ""
    closer = _one(wordings.CLOSERS, rng) if rng.random() < _CLOSER_SHARE else ""
    return opener + _one(choices, rng).format(x=subject.wording) + closer


def _length(rng: np.random.Generator) -> int:
    return int(rng.integers(*(SHORT_CHARS if rng.random() < SHORT_SHARE else LONG_CHARS)))


def _continuation(passage: str, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return a request to go on from a passage's opening words, answered by the rest."""
    words = passage.split(" ")
    count = int(rng.integers(6, max(7, min(30, len(words) // 2))))
    opening, rest = " ".join(words[:count]), " ".join(words[count:])
    return [
        ("user", _one(wordings.CONTINUE, rng).format(x=opening)),
        ("assistant", rest),
    ]


def _small_talk(rng: np.random.Generator) -> Turns:
    turns: list[tuple[str, str]] = []
    for _ in range(int(rng.choice([1, 1, 1, 2]))):
        talk = TALKS[int(rng.integers(len(TALKS)))]
        turns += [("user", _one(talk.remarks, rng)), ("assistant", _one(talk.replies, rng))]
    return tuple(turns)


def _with_system(turns: Turns, rng: np.random.Generator) -> Turns:
    if rng.random() < SYSTEM_SHARE:
        return (("system", _one(wordings.SYSTEMS, rng)), *turns)
    return turns


def _with_article(thing: str, rng: np.random.Generator) -> str:
    """Return the thing as a request names it: one, a certain one, or several."""
    if thing in ("sea", "moon", "ocean", "snow", "fire"):
        return f"the {thing}"
    article = "an" if thing[0] in "aeiou" else "a"
    return f"{article if rng.random() < 0.75 else 'the'} {thing}"


def _one(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
