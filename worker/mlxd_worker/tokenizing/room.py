"""Tokenises and detokenises texts off the event loop, within limits of time and memory.

Invariants:
- Short texts, with a `plain` tokenizer, run on a thread of this process, because nobody has to wait
  long for them: TOKENIZE_SHORTS_MAX at once. So do ordinary long prompts with a `modest` tokenizer:
  TOKENIZE_HERE_MAX at once, among the same threads, so that they take no more than
  TOKENIZE_HERE_MEMORY_BYTES_MAX and leave a thread for short ones.
- Everything else runs in a child, TOKENIZE_LONGS_MAX at once, whose memory is limited and whose
  priority is below whatever computes.
- The texts that wait are limited in number and in bytes (`turns`); if a caller leaves, its work is
  ended.
- Too much time or memory is the request's error; nothing else is held up by it.
- A forgotten tokenizer is not used any more: work in progress or waiting fails at once with an
  error that says so, its children have ended when `forget` returns, and no other is started.
- The threads are the room's own, one per turn and one for housekeeping: a turn never waits for a
  thread behind unrelated work, nor the other way round.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ModelUnloaded, ShuttingDown
from mlxd_shared.ops.heap import trim_heap
from mlxd_worker.killable.questions import Stop
from mlxd_worker.rooms.askers import to_its_end
from mlxd_worker.rooms.turns import Turns
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.children import Children
from mlxd_worker.tokenizing.process import COMMAND, IDS, TooLong, is_short, text_of

_T = TypeVar("_T")

THREADS: Final = config.TOKENIZE_SHORTS_MAX + config.TOKENIZE_LONGS_MAX + 1
"""One for each turn, and one that counts bytes and ends children."""


class TokenRoom:
    """One worker's tokenising. One owner: the event loop."""

    def __init__(
        self,
        *,
        waiting_max: int = config.TOKENIZE_WAITING_MAX,
        waiting_nbytes_max: int = config.TOKENIZE_WAITING_BYTES_MAX,
        limits_s: tuple[float, float] = (config.TOKENIZE_LEAST_S, config.TOKENIZE_MOST_S),
        learn_s: float = config.TOKENIZE_MOST_S,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """Start no process yet.

        limits_s: the time allowed for any text, and for one of PROMPT_BYTES_MAX.
        learn_s: the time allowed for a child to read the tokenizer.
        """
        queue = {"waiting_max": waiting_max, "waiting_nbytes_max": waiting_nbytes_max}
        self._short = Turns("texts to tokenise", turns_max=config.TOKENIZE_SHORTS_MAX, **queue)
        self._here = Turns("texts to tokenise", turns_max=config.TOKENIZE_HERE_MAX, **queue)
        """Long texts among the `_short` turns; a text with a turn here waits for one there."""
        self._long = Turns("long texts to tokenise", turns_max=config.TOKENIZE_LONGS_MAX, **queue)
        self._limits_s = limits_s
        self._learn_s = learn_s
        self._command = command
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mlxd-texts")
        self._children: Children | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._under_way: dict[asyncio.Task[Any], Tokenizer] = {}
        """The texts in progress or waiting, with their tokenizers."""
        self._forgotten: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()
        """Forgotten tokenizers, with their models' names."""
        self._is_closed = False

    async def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        *,
        field: str,
        kind: str,
        begin_text: bool = True,
        parse_special: bool = False,
    ) -> array[int]:
        """Return the ids of a text; see `Tokenizer.encode`.

        field: the text's name in errors; kind: the kind of call, by which turns are shared.

        Raises:
            InvalidRequest: it is too long, or takes too long or too much memory; names `field`.
            InvalidModel: the tokenizer fails on it; names its file.
            QueueFull: too many texts wait.
            ModelUnloaded, ShuttingDown: the tokenizer is forgotten, or the room closed, before the
                end.
        """
        how = {"begin_text": begin_text, "parse_special": parse_special}
        encode = partial(tokenizer.encode, text, **how)
        question = {"kind": "text", **how}
        return await self._encode(tokenizer, text, encode, question, field=field, kind=kind)

    async def encode_chat(
        self, tokenizer: Tokenizer, text: str, *, nonce: str, encode: Callable[[], list[int]],
        steering: dict[str, Any],
    ) -> array[int]:  # fmt: skip
        """Return the ids of a rendered conversation, by `encode` if no child is needed.

        steering: what the control tokens are made of (`Tokenizer.control_tokens`).

        Raises:
            InvalidRequest, InvalidModel, QueueFull, ModelUnloaded, ShuttingDown: as `encode`.
        """
        how = {"kind": "chat", "nonce": nonce, "steering": steering}
        return await self._encode(tokenizer, text, encode, how, field="chat", kind="chat")

    async def decode(
        self, tokenizer: Tokenizer, ids: array[int], *, skip_special: bool, field: str, kind: str
    ) -> str:
        """Return the text of ids, as `Tokenizer.decode`; raises as `encode`."""
        nbytes = ids.itemsize * len(ids)
        if is_short(tokenizer, ids):

            def decode() -> str:
                try:
                    return text_of(tokenizer, ids, skip_special=skip_special)
                except TooLong as error:
                    raise InvalidRequest.of(field, str(error)) from None

            done = self._do_here(decode, kind, nbytes, long=False)
            return await self._unless_forgotten(tokenizer, done)
        how = {"kind": "ids", "skip_special": skip_special}
        answering = self._ask_child(
            tokenizer, how, ids, nbytes, lambda answer: str(answer, "utf-8"), field=field, kind=kind
        )
        return await self._unless_forgotten(tokenizer, answering)

    async def forget(self, tokenizer: Tokenizer, model: str) -> None:
        """Use a tokenizer no more: its model is being unloaded.

        model: its name, for the errors of texts in progress.
        """
        self._forgotten[tokenizer] = model
        await self._give_up([task for task, its in self._under_way.items() if its is tokenizer])
        if self._children is not None and self._children.tokenizer is tokenizer:
            await self._end_children()

    async def close(self) -> None:
        """Accept no more texts; wait for what threads have begun, which is short."""
        self._is_closed = True
        await self._give_up(list(self._under_way))
        await self._end_children()
        await asyncio.to_thread(self._threads.shutdown)

    async def _encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        encode: Callable[[], list[int]],
        how: dict[str, Any],
        *,
        field: str,
        kind: str,
    ) -> array[int]:
        """Return the ids of a text: by `encode`, or by a child with the options `how`."""
        nbytes = await self._count_bytes(text, field)
        if not _is_for_here(tokenizer, text, nbytes):
            work = self._ask_child(tokenizer, how, text, nbytes, _ids_of, field=field, kind=kind)
        else:
            long = not _is_short(text)
            work = self._do_here(lambda: array(IDS, encode()), kind, nbytes, long=long)
        return await self._unless_forgotten(tokenizer, work)

    async def _unless_forgotten(self, tokenizer: Tokenizer, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of work with a tokenizer, unless that is forgotten first."""
        try:
            self._check(tokenizer)
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(work)
        self._under_way[task] = tokenizer
        task.add_done_callback(self._under_way.__delitem__)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or not me.cancelling():
                self._check(tokenizer)  # the waiter was not cancelled: the work was given up
            raise

    def _check(self, tokenizer: Tokenizer) -> None:
        """Raise ModelUnloaded if a tokenizer is forgotten, ShuttingDown if the room is closed."""
        if self._is_closed:
            raise ShuttingDown
        if tokenizer in self._forgotten:
            raise ModelUnloaded(self._forgotten[tokenizer])

    async def _give_up(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel work in progress; a thread runs to its end, with its result dropped."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _end_children(self) -> None:
        self._rest_later(None)
        children, self._children = self._children, None
        if children is not None:
            await self._on_thread(children.close)

    def _on_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _count_bytes(self, text: str, field: str) -> int:
        if len(text) > config.PROMPT_CHARS_MAX:
            raise InvalidRequest.of(field, f"at most {config.PROMPT_CHARS_MAX} characters")
        try:
            if text.isascii():
                nbytes = len(text)
            elif len(text) <= config.TOKENIZE_SHORT_CHARS_MAX:
                nbytes = len(text.encode())
            else:
                nbytes = await self._on_thread(lambda: len(text.encode()))
        except UnicodeEncodeError as error:
            problem = f"half a character (a lone surrogate) at character {error.start}"
            raise InvalidRequest.of(field, problem) from None
        if nbytes > config.PROMPT_BYTES_MAX:
            limit = f"{nbytes} bytes in UTF-8; at most {config.PROMPT_BYTES_MAX}"
            raise InvalidRequest.of(field, limit)
        return nbytes

    async def _do_here(self, work: Callable[[], _T], kind: str, nbytes: int, *, long: bool) -> _T:
        """Do something on a thread; after long work, return free memory to the system."""
        if not long:
            await self._short.acquire(kind, nbytes)
            return await to_its_end(partial(self._on_thread, work), self._short.release)
        await self._here.acquire(kind, nbytes)
        try:
            await self._short.acquire(kind, nbytes)
        except BaseException:
            self._here.release()
            raise

        def work_and_trim() -> _T:
            try:
                return work()
            finally:
                trim_heap()

        def over() -> None:
            self._short.release()
            self._here.release()

        return await to_its_end(partial(self._on_thread, work_and_trim), over)

    async def _ask_child(
        self,
        tokenizer: Tokenizer,
        how: dict[str, Any],
        body: str | array[int],
        nbytes: int,
        read: Callable[[memoryview], _T],
        *,
        field: str,
        kind: str,
    ) -> _T:
        """Return a child's answer, converted by `read` on the thread that waits for it."""
        await self._long.acquire(kind, nbytes)
        stop = Stop()
        least_s, most_s = self._limits_s
        limit_s = least_s + (most_s - least_s) * min(nbytes / config.PROMPT_BYTES_MAX, 1.0)
        self._rest_later(None)
        children, others = self._children_of(tokenizer)

        def ask() -> _T:
            if others is not None:
                others.close()
            content = body.encode() if isinstance(body, str) else body.tobytes()
            return read(children.ask(how, content, field=field, limit_s=limit_s, stop=stop))

        try:
            return await to_its_end(partial(self._on_thread, ask), self._over)
        except asyncio.CancelledError:
            stop.set()
            raise

    def _over(self) -> None:
        self._long.release()
        if self._long.are_idle:
            self._rest_later(config.TOKENIZE_CHILD_IDLE_S)

    def _children_of(self, tokenizer: Tokenizer) -> tuple[Children, Children | None]:
        """Return a tokenizer's children, and those of another that must be ended."""
        before = self._children
        if before is not None and before.tokenizer is tokenizer:
            return before, None
        self._children = Children(tokenizer, self._command, learn_s=self._learn_s)
        return self._children, before

    def _rest_later(self, delay_s: float | None) -> None:
        """End idle children after a while; None: cancel that."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if delay_s is not None and self._children is not None:
            rest = self._children.rest
            loop = asyncio.get_running_loop()
            self._resting = loop.call_later(delay_s, lambda: self._on_thread(rest))


def _is_for_here(tokenizer: Tokenizer, text: str, nbytes: int) -> bool:
    """Return whether a text needs no child: its time and memory are predictable."""
    if _is_short(text):
        return tokenizer.is_plain
    return tokenizer.is_modest and nbytes <= config.TOKENIZE_HERE_BYTES_MAX


def _is_short(text: str) -> bool:
    return len(text) <= config.TOKENIZE_SHORT_CHARS_MAX


def _ids_of(answer: memoryview) -> array[int]:
    ids = array(IDS)
    ids.frombytes(answer)
    return ids
