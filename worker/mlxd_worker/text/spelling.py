"""The bytes that one token stands for, by its spelling in the vocabulary and the decoder's steps.

Invariants:
- A token has the same bytes wherever it stands. What a decoder does at the start of a text alone
  (to strip a space, say) is not done here.
- A decoder that is not understood in full is refused by name; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

_Piece = str | bytes
_Step = Callable[[_Piece], _Piece]

_BYTE_TOKEN_CHARS: Final = len("<0x00>")


class UnknownDecoder(ValueError):
    """A decoder under which a single token has no bytes of its own; the text names the reason."""


def spelling(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return what turns a spelling into the token's bytes.

    decoder: as tokenizer.json describes it.

    Raises:
        UnknownDecoder: it does not say what a single token adds to a text.
    """
    if decoder is None:
        raise UnknownDecoder("the tokenizer has no decoder")
    steps = tuple(_steps(decoder))

    def spell(text: str) -> bytes:
        piece: _Piece = text
        for step in steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")

    return spell


def _steps(decoder: Mapping[str, Any]) -> Iterable[_Step]:
    match decoder["type"]:
        case "Sequence":
            for inner in decoder["decoders"]:
                yield from _steps(inner)
        case "ByteLevel":
            yield _from_byte_level
        case "ByteFallback":
            yield _from_byte_token
        case "Metaspace":
            yield _replacing(decoder["replacement"], " ")
        case "Replace" if "String" in decoder["pattern"]:
            yield _replacing(decoder["pattern"]["String"], decoder["content"])
        case "Fuse":
            pass
        case "Strip" if not decoder["stop"]:
            pass  # at the start of a text alone
        case other:
            raise UnknownDecoder(f"the decoder {json.dumps(other)} joins tokens in its own way")


def _replacing(old: str, new: str) -> _Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _from_byte_token(piece: _Piece) -> _Piece:
    """Return the byte that a token such as <0x0A> stands for; others as they are."""
    if isinstance(piece, str) and len(piece) == _BYTE_TOKEN_CHARS and piece.startswith("<0x"):
        try:
            return bytes.fromhex(piece[3:5]) if piece.endswith(">") else piece
        except ValueError:
            return piece
    return piece


def _from_byte_level(piece: _Piece) -> _Piece:
    """Return the bytes that the characters stand for; other tokens stay as they are."""
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, piece))
    except KeyError:
        return piece


def _byte_chars() -> dict[str, int]:
    """Return the printable stand-ins of byte-level vocabularies: Latin-1's own, or 256 and up."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {
        chr(256 + index): byte for index, byte in enumerate(moved)
    }


_BYTE_OF_CHAR: Final = _byte_chars()
