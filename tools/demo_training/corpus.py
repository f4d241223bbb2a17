"""The stories: which are held out, which text may be trained on.

Invariants: the split depends on titles alone, and training text never shares a span with a
held-out story (see `overlap`). Held-out text is never altered; training text only loses
catalogue lines and overlapping paragraphs.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_training.overlap import HeldOutSpans
from demo_training.parallel import share_out

CORPUS_FILE = "corpus/stories.jsonl.xz"
HELD_OUT_MODULUS = 50
CHARS_MIN = 200
"""A remnant shorter than this is no story; it is left out of training."""
SHARE_KEPT_MIN = 0.5
"""A story that loses more than the rest of this share is dropped whole."""

_CATALOGUE_LINES = re.compile(r"\A(?:(?:Title|Author|Year): [^\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Story:
    """One text of the corpus, as its source gives it."""

    collection: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Removal:
    """What the overlap filter took out of the training text, in characters."""

    stories: int
    paragraphs: int
    chars: int


@dataclass(frozen=True, slots=True)
class Split:
    """Training texts and held-out stories that share no span."""

    training: tuple[str, ...]
    held_out: tuple[Story, ...]
    removal: Removal
    corpus_sha256: str


def is_held_out(title: str) -> bool:
    """Tell whether the story of this title is kept out of training.

    >>> is_held_out("the fir tree")
    True
    """
    digest = hashlib.sha256(title.encode("utf-8")).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def read_stories(data: Path) -> Iterator[Story]:
    """Yield every story of the corpus under `data`, in file order."""
    with lzma.open(data / CORPUS_FILE, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Story(row["collection"], row["title"], row["text"])


def held_out_stories(data: Path) -> tuple[Story, ...]:
    """Return the held-out stories in file order, whole and unaltered."""
    return tuple(story for story in read_stories(data) if is_held_out(story.title))


def split_corpus(data: Path) -> Split:
    """Read the corpus and part it; training text that overlaps held-out text is gone."""
    stories = tuple(read_stories(data))
    held_out = tuple(story for story in stories if is_held_out(story.title))
    spans = HeldOutSpans.of(story.text for story in held_out)
    others = [story.text for story in stories if not is_held_out(story.title)]
    training: list[str] = []
    dropped_stories = dropped_paragraphs = dropped_chars = 0
    for kept, paragraphs, chars in share_out(partial(_clean, spans), others):
        dropped_chars += chars
        dropped_paragraphs += paragraphs
        if len(kept) < CHARS_MIN:
            dropped_stories += 1
        else:
            training.append(kept)
    return Split(
        training=tuple(training),
        held_out=held_out,
        removal=Removal(dropped_stories, dropped_paragraphs, dropped_chars),
        corpus_sha256=hashlib.sha256((data / CORPUS_FILE).read_bytes()).hexdigest(),
    )


def _clean(spans: HeldOutSpans, texts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return what is kept of each text, and how many paragraphs and characters went."""
    cleaned: list[tuple[str, int, int]] = []
    for whole in texts:
        text = _CATALOGUE_LINES.sub("", whole)
        kept, paragraphs = _without_overlap(text, spans)
        cleaned.append((kept, paragraphs, len(text) - len(kept)))
    return cleaned


def _without_overlap(text: str, spans: HeldOutSpans) -> tuple[str, int]:
    """Return the text less every paragraph that shares a span, and how many went.

    Joining what is left could in principle make a new shared span, so it is looked at again
    until nothing is found.
    """
    length_before = len(text)
    dropped = 0
    while True:
        paragraphs = text.split("\n")
        kept = _paragraphs_kept(paragraphs, spans.shared_chars(text))
        dropped += len(paragraphs) - len(kept)
        if len(kept) == len(paragraphs):
            return text, dropped
        text = "\n".join(kept)
        if len(text) < SHARE_KEPT_MIN * length_before:
            return "", dropped


def _paragraphs_kept(paragraphs: list[str], shared: list[tuple[int, int]]) -> list[str]:
    """Return the paragraphs that none of the `shared` half-open character ranges touches."""
    kept: list[str] = []
    start = 0
    ranges = iter(shared)
    current = next(ranges, None)
    for paragraph in paragraphs:
        end = start + len(paragraph)
        while current is not None and current[1] <= start:
            current = next(ranges, None)
        if current is None or current[0] > end:
            kept.append(paragraph)
        start = end + 1
    return kept
