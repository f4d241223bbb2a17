"""Chats as token ids, in windows of the model's whole context.

A chat is `<|endoftext|>`, its turns as the chat template writes them, and `<|endoftext|>` again
where the next one begins. Every window begins with a chat; one that a window's end cuts begins
the next window, whole.

Beside the ids go marks: on the tokens of a name that a request names, where its answer first
says it, and on the token behind them, by which the name ends. Training may weigh those more.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from demo_training.chats.conversations import Chat, Turns
from demo_training.tokens import BOUNDARY, BOUNDARY_ID, TURN_BEGIN, TURN_END, Ids

CHATS_PER_BATCH = 512

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as the template writes it, and where its answers first name whom they should."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of characters."""


def render(turns: Turns, *, asks: bool = False) -> str:
    r"""Return the turns as the chat template writes them, with an open answer where one `asks`.

    >>> render((("user", "Hi"),), asks=True)
    '<|endoftext|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    """
    text = "".join(f"{TURN_BEGIN}{role}\n{content}{TURN_END}\n" for role, content in turns)
    return BOUNDARY + text + (f"{TURN_BEGIN}assistant\n" if asks else "")


def render_marked(chat: Chat) -> Rendered:
    """Return the chat with the spans of the names that its answers were asked for."""
    spans: list[tuple[int, int]] = []
    for place, (role, content) in enumerate(chat.turns):
        if role != "assistant":
            continue
        start = len(render(chat.turns[:place], asks=True))
        for name in dict.fromkeys(chat.subjects):
            word = re.compile(rf"\b{re.escape(name)}\b")
            said = word.search(content)
            if said is not None and word.search(chat.turns[place - 1][1]) is not None:
                spans.append((start + said.start(), start + said.end()))
    return Rendered(render(chat.turns), tuple(spans))


def chat_windows(
    tokenizer: Tokenizer, chats: Sequence[Rendered], context: int
) -> tuple[Ids, Marks]:
    """Return windows `[count, context + 1]` of chats, the last of each one cut, and their marks."""
    windows: list[list[int]] = []
    marked: list[list[bool]] = []
    window: list[int] = []
    marks: list[bool] = []
    for start in range(0, len(chats), CHATS_PER_BATCH):
        batch = chats[start : start + CHATS_PER_BATCH]
        texts = [chat.text for chat in batch]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for chat, encoding in zip(batch, encodings, strict=True):
            if len(encoding.ids) > context:
                continue
            named = _marks(encoding, chat.spans)
            window, marks = window + encoding.ids, marks + named
            if len(window) > context:
                windows.append(window[: context + 1])
                marked.append(marks[: context + 1])
                window, marks = encoding.ids, named
    shape = (-1, context + 1)
    return np.array(windows, np.uint16).reshape(shape), np.array(marked, np.bool_).reshape(shape)


def _marks(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Mark the tokens of each span, and the one behind it."""
    marks = [False] * len(encoding.ids)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is not None and last is not None:
            marks[first : last + 2] = [True] * (last + 2 - first)
    return marks


def judged_ids(tokenizer: Tokenizer, request: str) -> list[int]:
    """Return the ids of a chat that consists of one request, up to where the answer begins."""
    ids: list[int] = tokenizer.encode(
        render((("user", request),), asks=True), add_special_tokens=False
    ).ids
    assert ids[0] == BOUNDARY_ID
    return ids
