"""Who is in a story, found by rule; and new names for people of training chats.

A word names somebody where it is capitalised, speaks or moves ("said Tom", "Tom ran") at least
twice in its story, stands there at least three times, and is no common word: one that the texts
mostly write in lower case.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from demo_training.parallel import share_out

DEEDS_MIN = 2
MENTIONS_MIN = 3
COMMON_SHARE = 0.05
"""A word whose lower-case form is found this often beside its capitalised one is common."""
MADE_UP_SHARE = 0.3
CROSSED_SHARE = 0.3
"""Of the new names. The rest are of training stories."""

_DEEDS = (
    "said|asked|cried|replied|answered|shouted|whispered|exclaimed|called|laughed|thought|began"
    "|muttered|went|came|ran|looked|took|stood|sat|turned|smiled|told|nodded|walked|felt"
)
_DOER = re.compile(rf"\b([A-Z][a-zé]{{2,13}}) (?:{_DEEDS})\b")
_DONE_BY = re.compile(rf"\b(?:{_DEEDS}) ([A-Z][a-zé]{{2,13}})\b")
_WORD = re.compile(r"[A-Za-zé]+")
_NOBODY = frozenset((
    "Earth", "Mars", "Venus", "God", "Lord", "Heaven", "Christmas", "English", "Indian", "French",
    "German", "American", "Indians", "London", "Paris", "Monday", "Tuesday", "Wednesday",
    "Thursday", "Friday", "Saturday", "Sunday", "Sir", "Madam", "Miss", "Mrs", "Doctor",
    "Captain", "Father", "Mother", "Uncle", "Aunt", "King", "Queen", "Prince", "Princess",
    "Professor", "Colonel", "General", "Major", "Lieutenant", "Sergeant", "Majesty", "Highness",
    "America", "England", "Chapter", "Then", "Here", "There",
))  # fmt: skip
_STARTS = (
    "b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n",
    "p", "qu", "r", "s", "sh", "st", "t", "th", "tr", "v", "w", "z",
)  # fmt: skip
_VOWELS = (
    "a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ee", "oo", "ou", "y",
)  # fmt: skip
_ENDS = (
    "b", "ck", "d", "l", "ll", "m", "n", "nd", "nn", "r", "rd", "rt", "s", "ss", "st", "t", "th",
    "x",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommonWords:
    """Words that are seldom or never names, in lower case."""

    words: frozenset[str]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        """Count how `texts` write their words."""
        counts: Counter[str] = Counter()
        for counted in share_out(_word_counts, texts):
            counts.update(counted)
        common = {
            word.lower()
            for word, count in counts.items()
            if counts[word.lower()] > COMMON_SHARE * count
        }
        return cls(frozenset(common))


def people_of(text: str, common: CommonWords) -> tuple[str, ...]:
    """Return the names of people and beasts in a story, the most frequent first."""
    deeds = Counter(_DOER.findall(text) + _DONE_BY.findall(text))
    doers = {
        name
        for name, count in deeds.items()
        if count >= DEEDS_MIN and name not in _NOBODY and name.lower() not in common.words
    }
    mentions = Counter(word for word in _WORD.findall(text) if word in doers)
    return tuple(name for name, count in mentions.most_common() if count >= MENTIONS_MIN)


def everybody(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the people of each text; what is common is judged over all of them."""
    return share_out(partial(_people_of_all, CommonWords.of(texts)), texts)


def _word_counts(texts: Sequence[str]) -> list[Counter[str]]:
    return [Counter(_WORD.findall(text)) for text in texts]


def _people_of_all(common: CommonWords, texts: Sequence[str]) -> list[tuple[str, ...]]:
    return [people_of(text, common) for text in texts]


def names(text: str, name: str) -> bool:
    """Tell whether `text` names somebody, as a whole word.

    >>> names("Tom's hat", "Tom"), names("Tommy", "Tom")
    (True, False)
    """
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def rename(text: str, old: str, new: str) -> str:
    """Return `text` with another name wherever the old one stands as a whole word."""
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def made_up_name(rng: np.random.Generator) -> str:
    """Return a name of one to three syllables that nobody need have had before.

    >>> made_up_name(np.random.default_rng(1)).istitle()
    True
    """
    syllables = int(rng.choice([1, 2, 2, 2, 3]))
    parts = [str(rng.choice(_STARTS)) + str(rng.choice(_VOWELS)) for _ in range(syllables)]
    end = str(rng.choice([*_ENDS, "", "", "a", "o"]))
    return ("".join(parts) + end).capitalize()


def crossed_name(rng: np.random.Generator, pool: Sequence[str]) -> str:
    """Return the head of one name and the tail of another, so that no part foretells the rest.

    >>> crossed_name(np.random.default_rng(2), ["Marian"])
    'Marian'
    """
    first, second = (pool[int(place)] for place in rng.integers(len(pool), size=2))
    return first[: (len(first) + 1) // 2] + second[(len(second) + 1) // 2 :]


@dataclass(frozen=True, slots=True)
class Namer:
    """Gives people of training chats new names, none of them a held-out one."""

    pool: tuple[str, ...]
    held_out: frozenset[str]

    @classmethod
    def of(cls, pool: Iterable[str], held_out: Set[str]) -> Self:
        """Take the names of training stories less the held-out ones."""
        return cls(tuple(sorted(set(pool) - held_out)), frozenset(held_out))

    def draw(self, rng: np.random.Generator, text: str) -> str:
        """Return a name that `text` does not hold yet."""
        while True:
            kind = rng.random()
            if kind < MADE_UP_SHARE:
                name = made_up_name(rng)
            elif kind < MADE_UP_SHARE + CROSSED_SHARE:
                name = crossed_name(rng, self.pool)
            else:
                name = self.pool[int(rng.integers(len(self.pool)))]
            if name not in self.held_out and not names(text, name):
                return name
