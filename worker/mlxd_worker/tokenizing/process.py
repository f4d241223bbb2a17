"""The process in which a model's long texts become tokens, and long runs of tokens text.

The library cannot be interrupted, takes some 100 bytes for each byte of a text, and runs what came
with a model. So it does that here, in a process that limits its memory, gives way to whatever
computes, and is killed when it is late or its answer is not wanted (`killable`).

First it is told of a tokenizer, then it is asked. A message is a line of JSON and bytes behind it:
UTF-8 of a text, or ids of 32 bits in the machine's order. An answer begins with GOOD, or with BAD
and what the library ran into, or with LONG and what is wrong with the text that was asked for.

One id may stand for TOKENIZER_PIECE_CHARS_MAX characters and a request may have millions of ids, so
that a text can be a thousand times as large as the request, and take several times that while the
library joins it. So the text of ids is bounded by what their tokens spell, before it is made.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.ops.heap import trim_heap
from mlxd_worker.killable.process import serve
from mlxd_worker.text.control_tokens import ControlTokens
from mlxd_worker.text.tokenizer import Tokenizer, library_faults, read_raw

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.tokenizing.process")
GOOD: Final = b"+"
BAD: Final = b"-"
LONG: Final = b">"
IDS: Final = "I"
"""The type code of ids in an array."""
PROBES: Final = ("", " ", "a", "aaaa" * 64, "Hello, w\u00f6rld! 123\n\t\u65e5\u672c \U0001f600 <s>")
"""Texts that a tokenizer is tried with: of any kind, none of them long."""


class TooLong(Exception):
    """A text that is not given out; what is wrong with it."""


def text_of(
    tokenizer: Tokenizer,
    ids: array[int],
    *,
    skip_special: bool,
    nbytes_max: int = config.PROMPT_BYTES_MAX,
) -> str:
    """Return the text of ids; see `Tokenizer.decode`.

    It is not made at all where the tokens spell twice as much: it may be somewhat shorter than
    what they spell, by a blank at its start, but not by half.

    Raises:
        TooLong: it has more than `nbytes_max` bytes in UTF-8.
        InvalidModel: as `Tokenizer.decode`.
    """
    if tokenizer.spells and _spell_more(tokenizer, ids, 2 * nbytes_max, skip_special=skip_special):
        raise TooLong(f"their tokens spell over {2 * nbytes_max} bytes; at most {nbytes_max}")
    text = tokenizer.decode(ids.tolist(), skip_special=skip_special)
    nbytes = len(text) if text.isascii() else len(text.encode())
    if nbytes > nbytes_max:
        raise TooLong(f"their text has {nbytes} bytes; at most {nbytes_max}")
    return text


def is_short(tokenizer: Tokenizer, ids: array[int]) -> bool:
    """Tell whether no text of so many ids can surprise, in time or in memory.

    Where a token's bytes depend on others, the decoder may make TOKENIZER_GROWTH_SHORT_MAX of one.
    """
    chars_max = config.PROMPT_CHARS_MAX if tokenizer.spells else config.TOKENIZE_SHORT_CHARS_MAX
    return (
        tokenizer.is_plain
        and len(ids) <= config.TOKENIZE_SHORT_IDS_MAX
        and len(ids) * tokenizer.piece_chars_max <= chars_max
    )


def _spell_more(
    tokenizer: Tokenizer, ids: array[int], nbytes_max: int, *, skip_special: bool
) -> bool:
    """Tell whether ids' tokens spell more than so many bytes; looks at each token once."""
    nbytes = 0
    for token_id, count in Counter(ids).items():
        if skip_special and token_id in tokenizer.special_ids:
            continue
        nbytes += count * tokenizer.written_nbytes(token_id)
        if nbytes > nbytes_max:
            return True
    return False


def message(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a question."""
    return json.dumps(header).encode() + b"\n" + body


class Desk:
    """Answers what is asked of one tokenizer."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None
        self._steering: dict[str, Any] | None = None
        self._control: ControlTokens | None = None
        self._works: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
            "learn": self._learn,
            "try": self._try,
            "text": self._text,
            "chat": self._chat,
            "ids": self._ids,
        }

    def answer(self, question: bytes) -> bytes:
        """Return what is answered to a message."""
        line, _, body = question.partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        try:
            return GOOD + self._works[header["kind"]](header, body)
        except InvalidModel as error:
            return BAD + error.problem.encode(errors="replace")
        except TooLong as error:
            return LONG + str(error).encode()
        finally:
            trim_heap()

    def _learn(self, header: dict[str, Any], body: bytes) -> bytes:
        """Read a tokenizer.json."""
        with library_faults("is not a tokenizer"):
            bos_id, add_bos = header.get("bos_id"), header.get("add_bos")
            self._tokenizer = Tokenizer(read_raw(body), bos_id=bos_id, add_bos=add_bos, eos_ids=())
        return b""

    def _try(self, header: dict[str, Any], body: bytes) -> bytes:
        """Read a tokenizer.json, and texts with it."""
        self._learn(header, body)
        for text in PROBES:
            self._known.decode(self._known.encode(text))
        return b""

    def _text(self, header: dict[str, Any], body: bytes) -> bytes:
        ids = self._known.encode(
            body.decode(),
            begin_text=header["begin_text"],
            parse_special=header["parse_special"],
        )
        return array(IDS, ids).tobytes()

    def _chat(self, header: dict[str, Any], body: bytes) -> bytes:
        if self._control is None or header["steering"] != self._steering:
            self._steering = header["steering"]
            self._control = self._known.control_tokens(**header["steering"])
        with library_faults("cannot read a chat"):
            ids = self._control.encode(body.decode(), header["nonce"])
        return array(IDS, ids).tobytes()

    def _ids(self, header: dict[str, Any], body: bytes) -> bytes:
        ids = array(IDS)
        ids.frombytes(body)
        return text_of(self._known, ids, skip_special=header["skip_special"]).encode()

    @property
    def _known(self) -> Tokenizer:
        assert self._tokenizer is not None, "asked before it was told"
        return self._tokenizer


def main() -> None:
    """Serve standard input, within bounds of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(config.TOKENIZE_CHILD_NICE)
    desk, given_way = Desk(), False

    def answer(question: bytes) -> bytes:
        nonlocal given_way
        answered = desk.answer(question)
        if not given_way:  # behind the first, which others wait for
            os.nice(config.TOKENIZE_CHILD_NICE)
            given_way = True
        return answered

    serve(
        answer,
        limit_s=config.TOKENIZE_MOST_S,
        memory_nbytes_max=config.TOKENIZE_CHILD_BYTES_MAX,
    )


if __name__ == "__main__":
    main()
