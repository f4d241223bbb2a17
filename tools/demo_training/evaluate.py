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
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import Story
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


def sample_of(stories: Sequence[Story]) -> list[Story]:
    """Return the quick sample: the opening characters of every eighth story, in title order."""
    ordered = sorted(stories, key=lambda story: story.title)[::SAMPLE_EVERY]
    return [Story(s.collection, s.title, s.text[:SAMPLE_CHARS]) for s in ordered]


def evaluate(folder: Path, stories: Sequence[Story]) -> Score:
    """Score `stories` by the model in `folder`."""
    model = Reference.load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text_nbytes = targets = 0
    nats = 0.0
    for story in stories:
        ids = tokenizer.encode(story.text, add_special_tokens=False).ids
        sequence = np.array([BOUNDARY_ID, *ids, BOUNDARY_ID], np.int64)
        text_nbytes += len(story.text.encode("utf-8"))
        targets += len(sequence) - 1
        nats += _nats(model, sequence)
    return Score(len(stories), text_nbytes, targets, nats / math.log(2))


def windows(targets: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first scored): inputs [start, end) score targets [first, end).

    Target t is the token that follows input t; the scored ranges tile [0, targets).
    """
    scored = 0
    while scored < targets:
        end = min(targets, context) if scored == 0 else min(targets, scored + context // 2)
        yield max(0, end - context), end, scored
        scored = end


def _nats(model: Reference, sequence: Integers) -> float:
    total = 0.0
    for start, end, first in windows(len(sequence) - 1, model.context):
        logits = model.logits(sequence[start:end], rows_from=first - start)
        chosen = sequence[first + 1 : end + 1]
        logs = log_softmax(logits)[np.arange(len(chosen)), chosen]
        total -= float(logs.sum(dtype=np.float64))
    return total
