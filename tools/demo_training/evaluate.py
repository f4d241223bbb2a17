"""Bits a byte on held-out stories, computed from the shipped folder alone.

How it is counted. A story is `BOS ids EOS`. Its targets are every id and the EOS; each is
scored exactly once, and the bits of all are divided by the bytes of the story's UTF-8 text, so
a byte is paid for however the tokenizer cuts it. Windows of the model's whole context C advance
by C/2: the first scores all its targets, each later one the last C/2. So a target has at least
C/2 tokens before it, or the whole story so far. Nothing is scored across stories.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import Story
from demo_training.parallel import share_out
from demo_training.reference import Integers, Reference, log_softmax
from demo_training.tokens import BOUNDARY_ID

SAMPLE_EVERY = 8
SAMPLE_CHARS = 6000


@dataclass(frozen=True, slots=True)
class Score:
    """The cost of a body of text."""

    stories: int
    text_nbytes: int
    targets: int
    bits: float

    @property
    def bits_per_byte(self) -> float:
        """Bits paid for each byte of text."""
        return self.bits / self.text_nbytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A window of a story: its ids, the last target included, and the first input scored."""

    ids: Integers
    first: int


def sample_of(stories: Sequence[Story]) -> list[Story]:
    """Return the quick sample: the opening characters of every eighth story, in title order."""
    ordered = sorted(stories, key=lambda story: story.title)[::SAMPLE_EVERY]
    return [Story(s.collection, s.title, s.text[:SAMPLE_CHARS]) for s in ordered]


def evaluate(folder: Path, stories: Sequence[Story]) -> Score:
    """Score `stories` by the model in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    context = Reference.load(folder).context
    pieces: list[Piece] = []
    for story in stories:
        ids = tokenizer.encode(story.text, add_special_tokens=False).ids
        sequence = np.array([BOUNDARY_ID, *ids, BOUNDARY_ID], np.int64)
        pieces += [
            Piece(sequence[start : end + 1], first - start)
            for start, end, first in windows(len(sequence) - 1, context)
        ]
    nats = share_out(partial(_nats, folder), pieces)
    text_nbytes = sum(len(story.text.encode("utf-8")) for story in stories)
    targets = sum(len(piece.ids) - 1 - piece.first for piece in pieces)
    return Score(len(stories), text_nbytes, targets, sum(nats) / math.log(2))


def windows(targets: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first scored): inputs [start, end) score targets [first, end).

    Target t is the token that follows input t; the scored ranges tile [0, targets).
    """
    scored = 0
    while scored < targets:
        end = min(targets, context) if scored == 0 else min(targets, scored + context // 2)
        yield max(0, end - context), end, scored
        scored = end


def _nats(folder: Path, pieces: Sequence[Piece]) -> list[float]:
    model = Reference.load(folder)
    nats: list[float] = []
    for piece in pieces:
        logits = model.logits(piece.ids[:-1], rows_from=piece.first)
        chosen = piece.ids[piece.first + 1 :]
        logs = log_softmax(logits)[np.arange(len(chosen)), chosen]
        nats.append(-float(logs.sum(dtype=np.float64)))
    return nats
