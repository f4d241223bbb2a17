"""A tokenizer that is forgotten is read with no more: no text, no waiter and no child is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, MlxdError, ModelUnloaded, ShuttingDown
from mlxd_worker.killable.questions import Closed
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import COMMAND
from mlxd_worker.tokenizing.room import THREADS, TokenRoom
from tests.worker.made_tokenizers import byte_level

LONG = "a" * (config.TOKENIZE_SHORT_CHARS_MAX + 1)
NEVER = ("/nowhere/at/all",)
ENOUGH_S = 60.0
HANGS = "import sys, threading; open(sys.argv[1], 'w').close(); threading.Event().wait()"


def tokenizer_of(*, plain: bool = False, raw: RawTokenizer | None = None) -> Tokenizer:
    own = raw or byte_level()
    return Tokenizer(own, bos_id=None, add_bos=None, eos_ids=(), is_plain=plain)


def encode_soon(
    room: TokenRoom, tokenizer: Tokenizer, text: str = LONG
) -> asyncio.Task[array[int]]:
    return asyncio.create_task(room.encode(tokenizer, text, field="text", kind="tokenize"))


async def error_of(task: asyncio.Task[Any]) -> MlxdError:
    """Return the error that somebody is told, who waits no longer than a test does."""
    with pytest.raises(MlxdError) as caught:
        await asyncio.wait_for(task, ENOUGH_S)
    return caught.value


async def hanging(path: Path) -> tuple[TokenRoom, Tokenizer, asyncio.Task[array[int]]]:
    """Return a room, a tokenizer and who reads with it, whose child has begun and never answers."""
    os.mkfifo(path)
    room, tokenizer = TokenRoom(command=(sys.executable, "-c", HANGS, str(path))), tokenizer_of()
    reading = encode_soon(room, tokenizer)
    (await asyncio.to_thread(path.open)).close()  # opens once the child does
    return room, tokenizer, reading


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.asyncio
async def test_texts_and_waiters_end_with_their_tokenizer(tmp_path: Path) -> None:
    """By an error that names the model; its child is gone, and no other is made. Others are read
    with as before."""
    room, tokenizer, reading = await hanging(tmp_path / "begun")
    waits = encode_soon(room, tokenizer)
    await asyncio.sleep(0)
    assert room._children is not None
    children = room._children
    (child,) = children._pool._children
    await room.forget(tokenizer, "llama")

    for task in (
        reading,
        waits,
        encode_soon(room, tokenizer),
        encode_soon(room, tokenizer, "short"),
    ):
        error = await error_of(task)
        assert isinstance(error, ModelUnloaded)
        assert error.model == "llama"
    assert is_gone(child.pid)
    with pytest.raises(Closed):
        children._pool.ask(b"", limit_s=ENOUGH_S)
    assert room._children is None

    room._command, other = COMMAND, tokenizer_of()
    try:
        assert list(await encode_soon(room, other)) == other.encode(LONG)
    finally:
        await room.close()


@pytest.mark.asyncio
async def test_who_leaves_a_tokenizer_that_is_forgotten_has_left(tmp_path: Path) -> None:
    """A cancellation stays one, though the text ends at the same moment for another reason."""
    room, tokenizer, reading = await hanging(tmp_path / "begun")
    reading.cancel()
    await room.forget(tokenizer, "llama")
    with pytest.raises(asyncio.CancelledError):
        await reading
    await room.close()


class HeldTokenizer(Tokenizer):
    """Plain; it encodes once it is let go."""

    def __init__(self) -> None:
        super().__init__(byte_level(), bos_id=None, add_bos=None, eos_ids=())
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(
        self, text: str, *, begin_text: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Wait to be let go."""
        self.begun.set()
        assert self.go.wait(ENOUGH_S)
        return [len(text)]


@pytest.mark.asyncio
async def test_a_text_on_a_thread_ends_for_whoever_waits() -> None:
    """A thread cannot be stopped: it keeps its turn to its end, and its ids go nowhere."""
    room, tokenizer, other = TokenRoom(command=NEVER), HeldTokenizer(), tokenizer_of(plain=True)
    reading = encode_soon(room, tokenizer)
    await asyncio.to_thread(tokenizer.begun.wait)
    waits = encode_soon(room, tokenizer)  # one long text at once is read on a thread
    await asyncio.sleep(0)
    await room.forget(tokenizer, "llama")
    assert isinstance(await error_of(reading), ModelUnloaded)
    assert isinstance(await error_of(waits), ModelUnloaded)

    next_one = encode_soon(room, other)
    assert list(await encode_soon(room, other, "ab")) == other.encode("ab")
    assert not next_one.done()
    tokenizer.go.set()
    assert list(await asyncio.wait_for(next_one, ENOUGH_S)) == other.encode(LONG)
    await room.close()


@pytest.mark.asyncio
async def test_a_child_that_is_not_asked_any_more_ends() -> None:
    """And its memory with it, a while after the last text; the next text has another."""
    room, tokenizer, pids = TokenRoom(), tokenizer_of(), set()
    try:
        for _ in range(2):
            assert list(await encode_soon(room, tokenizer)) == tokenizer.encode(LONG)
            assert room._children is not None
            (child,) = room._children._pool._children
            pids.add(child.pid)
            assert room._resting is not None
            rests_s = room._resting.when() - asyncio.get_running_loop().time()
            assert rests_s <= config.TOKENIZE_CHILD_IDLE_S
            room._rest_later(0.0)  # the same, without the wait
            await asyncio.to_thread(child.wait, ENOUGH_S)
    finally:
        await room.close()
    assert len(pids) == 2


@pytest.mark.asyncio
async def test_a_closed_room_has_no_child_and_no_thread(tmp_path: Path) -> None:
    """What was under way is told that the server stops, and so is whoever comes later."""
    room, tokenizer, reading = await hanging(tmp_path / "begun")
    assert room._children is not None
    (child,) = room._children._pool._children
    threads = set(room._threads._threads)
    waits: list[FrameType] = []

    def note(frame: FrameType, event: str, _called: Any) -> None:
        if event == "call" and frame.f_code is subprocess.Popen.wait.__code__:
            waits.append(frame)

    sys.setprofile(note)
    try:
        await room.close()
    finally:
        sys.setprofile(None)
    assert not waits, "children are seen off by other threads"
    for task in (reading, encode_soon(room, tokenizer), encode_soon(room, tokenizer, "short")):
        assert isinstance(await error_of(task), ShuttingDown)
    assert is_gone(child.pid)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    await room.close()


@pytest.mark.asyncio
async def test_a_room_needs_no_thread_of_anybody_elses() -> None:
    """The event loop's own pool may be full of other work, and is not filled by texts."""
    loop, go = asyncio.get_running_loop(), threading.Event()
    begun = threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        assert go.wait(ENOUGH_S)

    workers = min(32, (os.cpu_count() or 1) + 4) * 2  # more than any default has
    others = [loop.run_in_executor(None, hold) for _ in range(workers)]
    room, tokenizer = TokenRoom(), tokenizer_of()
    plain = tokenizer_of(plain=True)
    accented = "\u00e9" * (config.TOKENIZE_SHORT_CHARS_MAX + 1)  # which has to be counted
    try:
        for text in ("ab", LONG, accented):
            for its in (plain, tokenizer):
                ids = await asyncio.wait_for(encode_soon(room, its, text), ENOUGH_S)
                assert list(ids) == its.encode(text)
        assert len(room._threads._threads) <= THREADS
    finally:
        go.set()
        await asyncio.gather(*others)
        await room.close()


class Unwritable(Tokenizer):
    """One that cannot be told to a child."""

    @property
    def content(self) -> bytes:
        """Fail."""
        raise InvalidModel("cannot be written", "tokenizer.json")


@pytest.mark.asyncio
async def test_a_turn_is_given_back_where_no_child_can_be_made() -> None:
    """For want of its program, of what to tell it, or of a thread: the next text has the turn."""
    room, good = TokenRoom(command=NEVER), tokenizer_of()
    unwritable = Unwritable(byte_level(), bos_id=None, add_bos=None, eos_ids=(), is_plain=False)
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(encode_soon(room, good), ENOUGH_S)
    room._command = COMMAND
    with pytest.raises(InvalidModel):
        await asyncio.wait_for(encode_soon(room, unwritable), ENOUGH_S)

    class NoThreads(TokenRoom):
        """One that has no thread until it is given one."""

        def _on_thread(self, work: Any) -> Any:
            if self._command == NEVER:
                raise RuntimeError
            return super()._on_thread(work)

    bare = NoThreads(command=NEVER)
    for text in (LONG, "ab"):
        for _ in range(THREADS):
            for its in (good, tokenizer_of(plain=True)):
                with pytest.raises(RuntimeError):
                    await asyncio.wait_for(encode_soon(bare, its, text), ENOUGH_S)
    bare._command = COMMAND
    try:
        for later in (room, bare):
            ids = await asyncio.wait_for(encode_soon(later, tokenizer_of()), ENOUGH_S)
            assert list(ids) == good.encode(LONG)
    finally:
        await room.close()
        await bare.close()
