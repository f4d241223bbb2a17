"""Passages of stories: from a natural beginning to a natural end.

A passage begins with a paragraph and ends with one, or, where that would be far off, with a
sentence outside quotation marks. It holds no headings and no words about the edition.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHARS_MIN = 160
CHARS_MAX = 1100

_SENTENCE_END = re.compile(r"(?<=[.!?])([\"']?) (?=[\"'A-Z])")
_NATURAL_END = re.compile(r"[.!?][\"']?\Z")
_EDITION = re.compile(
    r"Transcriber|Gutenberg|copyright|Illustration|CHAPTER|Chapter |\bTHE END\b|[\[\]_*=|]|- - -"
)
_LEANS_BACK = re.compile(
    r"\A(?:He|She|It|They|But|And|So|Then|This|That|These|Those|His|Her|Their|Him|Yet|Thus|Or)\b"
)


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage, and the place in its story's text where it ended."""

    text: str
    end: int


def paragraph_starts(text: str) -> Iterator[int]:
    """Yield where paragraphs begin that can begin a passage."""
    start = 0
    for paragraph in text.split("\n"):
        opening = paragraph[:1]
        if len(paragraph) >= 40 and opening.isupper() and _LEANS_BACK.match(paragraph) is None:
            yield start
        start += len(paragraph) + 1


def passage_at(text: str, start: int, chars: int) -> Passage | None:
    """Return the passage from `start` of about `chars` characters; None where there is none.

    It is no shorter than 160 characters and no longer than 1,100; a paragraph that would take it
    past twice `chars` is cut behind a sentence.
    """
    end, far = start, min(CHARS_MAX, 2 * chars)
    while end < len(text) and end - start < chars:
        line = text.find("\n", end + 1)
        line = len(text) if line < 0 else line
        if line - start > far:
            end = _sentence_end(text, start, chars)
            break
        end = line
    passage = text[start:end].strip()
    if not CHARS_MIN <= len(passage) <= CHARS_MAX or _NATURAL_END.search(passage) is None:
        return None
    if _EDITION.search(passage) is not None or not _lines_are_prose(passage):
        return None
    return Passage(passage, end)


def sentences(text: str) -> list[str]:
    """Return the sentences of one passage; line ends part them too.

    >>> sentences('He ran. "Stop!" she cried.')
    ['He ran.', '"Stop!" she cried.']
    """
    parts: list[str] = []
    for line in text.split("\n"):
        start = 0
        for match in _SENTENCE_END.finditer(line):
            parts.append(line[start : match.end(1)])
            start = match.end()
        parts.append(line[start:])
    return parts


def shorten(text: str, needed: str) -> str | None:
    """Return the passage told in at most half its length; None where it has few sentences.

    Its first sentence stays, and of the others those that name what is `needed`, to the half.
    """
    parts = sentences(text)
    if len(parts) < 4:
        return None
    kept = [parts[0]]
    for part in parts[1:]:
        if needed in part and len(" ".join([*kept, part])) <= len(text) // 2:
            kept.append(part)
    short = " ".join(kept)
    natural = _NATURAL_END.search(short) is not None and short.count('"') % 2 == 0
    natural = natural and needed in short
    return short if natural and 40 <= len(short) <= len(text) // 2 else None


def _sentence_end(text: str, start: int, chars: int) -> int:
    """Return the first end of a sentence after `chars` that leaves no quotation open."""
    last = start
    for match in _SENTENCE_END.finditer(text, start, start + CHARS_MAX):
        if text.count('"', start, match.end(1)) % 2 == 0:
            last = match.end(1)
            if last - start >= chars:
                break
    return last


def _lines_are_prose(passage: str) -> bool:
    lines: Sequence[str] = passage.split("\n")
    return all(any(letter.islower() for letter in line) for line in lines)
