"""Ordinary long prompts wait for no process: they are read here, one at once, within an account."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlxd_shared import config
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.room import TokenRoom
from tests.worker.made_tokenizers import byte_level

NEVER = ("/nowhere/at/all",)
"""The command of children that must not be started."""
LONGEST = "ab" * (config.TOKENIZE_HERE_BYTES_MAX // 2)
LONG = "a" * (config.TOKENIZE_SHORT_CHARS_MAX + 1)
ENOUGH_S = 60.0


def tokenizer_of(*, modest: bool = True) -> Tokenizer:
    return Tokenizer(byte_level(), bos_id=None, add_bos=None, eos_ids=(), is_modest=modest)


@pytest.mark.asyncio
@pytest.mark.parametrize("parse_special", [False, True])
async def test_an_ordinary_long_prompt_needs_no_child(*, parse_special: bool) -> None:
    """Up to the bound in bytes, whether or not its special tokens count."""
    tokenizer = tokenizer_of()
    ids = await TokenRoom(command=NEVER).encode(
        tokenizer, LONGEST, field="text", kind="tokenize", parse_special=parse_special
    )
    assert list(ids) == tokenizer.encode(LONGEST, parse_special=parse_special)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "modest"),
    [(f"{LONGEST}a", True), ("\u00e4" * (len(LONGEST) // 2) + "b", True), (LONG, False)],
    ids=["characters", "bytes", "memory"],
)
async def test_what_is_longer_or_takes_more_is_a_childs(text: str, *, modest: bool) -> None:
    """One byte above the bound, in either alphabet, or by a tokenizer that makes much of it."""
    room, tokenizer = TokenRoom(command=NEVER), tokenizer_of(modest=modest)
    with pytest.raises(FileNotFoundError):  # the child's program
        await room.encode(tokenizer, text, field="text", kind="tokenize")
    with pytest.raises(FileNotFoundError):
        await room.encode_chat(tokenizer, text, nonce="1", encode=list, steering={})
    await room.close()


class Held:
    """Work of long texts that goes on until it is let go, and who is at it."""

    def __init__(self) -> None:
        """Nobody is."""
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self._lock = threading.Lock()
        self._at_once = 0
        self.most_at_once = 0

    def encode(self) -> list[int]:
        """Wait to be let go."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.begun.release()
        assert self.go.wait(ENOUGH_S)
        with self._lock:
            self._at_once -= 1
        return [7]


@pytest.mark.asyncio
async def test_long_texts_are_one_at_once_and_leave_short_ones_a_thread() -> None:
    """So that what they take is bounded; who leaves while waiting takes nobody's turn along."""
    room, tokenizer, held = TokenRoom(command=NEVER), tokenizer_of(), Held()

    async def long() -> list[int]:
        encode = held.encode
        return list(await room.encode_chat(tokenizer, LONG, nonce="1", encode=encode, steering={}))

    calls = [asyncio.create_task(long()) for _ in range(4)]
    assert await asyncio.to_thread(held.begun.acquire, timeout=ENOUGH_S)
    for _ in range(8):  # more than one thread has room for, one behind another
        ids = await room.encode(tokenizer, "ab", field="text", kind="tokenize")
        assert list(ids) == tokenizer.encode("ab")
    calls[1].cancel()
    held.go.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(done.pop(1), asyncio.CancelledError)
    assert done == [[7]] * 3
    assert held.most_at_once == config.TOKENIZE_HERE_MAX == 1
