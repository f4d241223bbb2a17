"""Chats as token ids, in windows of the model's whole context.

A chat is `<|endoftext|>`, its turns as the chat template writes them, and `<|endoftext|>` again
where the next one begins. Every window begins with a chat; one that a window's end cuts begins
the next window, whole.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from demo_training.chats.conversations import Turns
from demo_training.tokens import BOUNDARY, BOUNDARY_ID, TURN_BEGIN, TURN_END, Ids

CHATS_PER_BATCH = 512


def render(turns: Turns, *, asks: bool = False) -> str:
    r"""Return the turns as the chat template writes them, with an open answer where one `asks`.

    >>> render((("user", "Hi"),), asks=True)
    '<|endoftext|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    """
    text = "".join(f"{TURN_BEGIN}{role}\n{content}{TURN_END}\n" for role, content in turns)
    return BOUNDARY + text + (f"{TURN_BEGIN}assistant\n" if asks else "")


def chat_windows(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> Ids:
    """Return windows `[count, context + 1]` of rendered chats, the last of each one cut."""
    encoded: list[list[int]] = []
    for start in range(0, len(texts), CHATS_PER_BATCH):
        batch = list(texts[start : start + CHATS_PER_BATCH])
        encoded += [
            encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False)
        ]
    windows: list[list[int]] = []
    window: list[int] = []
    for ids in encoded:
        if len(ids) > context:
            continue
        window += ids
        if len(window) > context:
            windows.append(window[: context + 1])
            window = list(ids)
    return np.array(windows, np.uint16).reshape(-1, context + 1)


def judged_ids(tokenizer: Tokenizer, request: str) -> list[int]:
    """Return the ids of a chat that consists of one request, up to where the answer begins."""
    ids: list[int] = tokenizer.encode(
        render((("user", request),), asks=True), add_special_tokens=False
    ).ids
    assert ids[0] == BOUNDARY_ID
    return ids
