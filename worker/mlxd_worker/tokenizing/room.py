"""Where texts become tokens, and tokens text, off the event loop and within an account.

Invariants:
- What is short, by a tokenizer that is `plain`, is done on a thread of this process, for nobody has
  to wait long for it: TOKENIZE_SHORTS_MAX at once. So is what an ordinary long prompt is, by a
  tokenizer that is `modest`: TOKENIZE_HERE_MAX of these at once, within the same threads, so that
  they take no more than TOKENIZE_HERE_MEMORY_BYTES_MAX and leave short ones a thread.
- Everything else is done by a child, with TOKENIZE_LONGS_MAX at once, in memory of its own that is
  bounded, and behind whatever computes.
- Who has to wait is bounded in number and in bytes (`turns`); who leaves ends what was begun.
- What takes too long, or too much memory, is the request's error; nothing else is held up by it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mlxd_shared import config
from mlxd_shared.errors import InvalidModel, InvalidRequest, ModelUnloaded
from mlxd_worker.killable.pool import Died, Late, Pool, Stop, Stopped
from mlxd_worker.machine.heap import trim_heap
from mlxd_worker.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import BAD, COMMAND, IDS, message
from mlxd_worker.tokenizing.rules import FILE
from mlxd_worker.tokenizing.turns import Turns

_T = TypeVar("_T")


class TokenRoom:
    """One worker's texts. One owner: the event loop."""

    def __init__(
        self,
        *,
        waiting_max: int = config.TOKENIZE_WAITING_MAX,
        waiting_nbytes_max: int = config.TOKENIZE_WAITING_BYTES_MAX,
        limits_s: tuple[float, float] = (config.TOKENIZE_LEAST_S, config.TOKENIZE_MOST_S),
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """Start no process yet.

        limits_s: what any text may take, and what one of PROMPT_BYTES_MAX may.
        """
        queue = {"waiting_max": waiting_max, "waiting_nbytes_max": waiting_nbytes_max}
        self._short = Turns("texts to tokenise", turns_max=config.TOKENIZE_SHORTS_MAX, **queue)
        self._here = Turns("texts to tokenise", turns_max=config.TOKENIZE_HERE_MAX, **queue)
        """Those among `_short` that are not; who has a turn waits for one there."""
        self._long = Turns("long texts to tokenise", turns_max=config.TOKENIZE_LONGS_MAX, **queue)
        self._limits_s = limits_s
        self._command = command
        self._children: tuple[Tokenizer, Pool] | None = None
        self._resting: asyncio.TimerHandle | None = None

    async def encoded(
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

        field: what an error calls the text; kind: of the call, which kinds take turns by.

        Raises:
            InvalidRequest: it is too long, or takes too long or too much memory; names `field`.
            InvalidModel: the tokenizer fails on it; names its file.
            QueueFull: too many wait.
        """
        nbytes = await _checked(text, field)
        how: dict[str, Any] = {"begin_text": begin_text, "parse_special": parse_special}
        if not _is_for_here(tokenizer, text, nbytes):
            how |= {"kind": "text"}
            return await self._asked(tokenizer, how, text, nbytes, _ids_of, field=field, kind=kind)

        def encode() -> array[int]:
            return array(IDS, tokenizer.encode(text, **how))

        return await self._done_here(encode, kind, nbytes, long=not _is_short(text))

    async def encoded_chat(
        self, tokenizer: Tokenizer, text: str, *, nonce: str, encode: Callable[[], list[int]],
        steering: dict[str, Any],
    ) -> array[int]:  # fmt: skip
        """Return the ids of a rendered conversation, by `encode` where no child is needed.

        steering: what the control tokens are made of (`Tokenizer.control_tokens`).

        Raises:
            InvalidRequest, InvalidModel, QueueFull: as `encoded`.
        """
        nbytes = await _checked(text, "chat")
        if not _is_for_here(tokenizer, text, nbytes):
            how = {"kind": "chat", "nonce": nonce, "steering": steering}
            return await self._asked(
                tokenizer, how, text, nbytes, _ids_of, field="chat", kind="chat"
            )
        long = not _is_short(text)
        return await self._done_here(lambda: array(IDS, encode()), "chat", nbytes, long=long)

    async def decoded(
        self, tokenizer: Tokenizer, ids: array[int], *, skip_special: bool, field: str, kind: str
    ) -> str:
        """Return the text of ids; see `Tokenizer.decode`.

        Raises:
            InvalidRequest, InvalidModel, QueueFull: as `encoded`.
        """
        if tokenizer.is_plain and len(ids) <= config.TOKENIZE_SHORT_IDS_MAX:

            def decode() -> str:
                return tokenizer.decode(ids.tolist(), skip_special=skip_special)

            nbytes = ids.itemsize * len(ids)
            return await self._done_here(decode, kind, nbytes, long=False)
        how = {"kind": "ids", "skip_special": skip_special}
        nbytes = ids.itemsize * len(ids)

        def read(answer: memoryview) -> str:
            if len(answer) > config.PROMPT_BYTES_MAX:
                limit = f"their text has {len(answer)} bytes; at most {config.PROMPT_BYTES_MAX}"
                raise InvalidRequest.of(field, limit)
            return str(answer, "utf-8")

        return await self._asked(tokenizer, how, ids, nbytes, read, field=field, kind=kind)

    def forget(self) -> None:
        """End the children: the model is on its way out."""
        self._rest_later(None)
        if self._children is not None:
            self._children[1].close()
        self._children = None

    # --- how -------------------------------------------------------------------------------------

    async def _done_here(self, work: Callable[[], _T], kind: str, nbytes: int, *, long: bool) -> _T:
        """Do something on a thread; what is long gives its memory back to the system behind it."""
        if not long:
            await self._short.acquire(kind, nbytes)
            return await _to_its_end(asyncio.to_thread(work), self._short.release)
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

        return await _to_its_end(asyncio.to_thread(work_and_trim), over)

    async def _asked(
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
        """Return a child's answer, as `read` reads it on the thread that waits for it."""
        await self._long.acquire(kind, nbytes)
        stop = Stop()
        least_s, most_s = self._limits_s
        limit_s = least_s + (most_s - least_s) * min(nbytes / config.PROMPT_BYTES_MAX, 1.0)
        self._rest_later(None)
        try:
            children = self._children_of(tokenizer)
        except BaseException:
            self._over()
            raise

        def ask() -> _T:
            content = body.encode() if isinstance(body, str) else body.tobytes()
            answer = children.ask(message(how, content), limit_s=limit_s, stop=stop)
            if answer.startswith(BAD):
                raise InvalidModel(answer[len(BAD) :].decode(), FILE)
            return read(memoryview(answer)[len(BAD) :])

        try:
            return await _to_its_end(asyncio.to_thread(ask), self._over)
        except asyncio.CancelledError:
            stop.set()
            raise
        except Late:
            problem = f"takes longer than {limit_s:.0f} s to read with the model's {FILE}"
            raise InvalidRequest.of(field, problem) from None
        except Died:
            most = config.TOKENIZE_CHILD_BYTES_MAX
            problem = f"takes more than {most} bytes of memory to read with the model's {FILE}"
            raise InvalidRequest.of(field, problem) from None
        except Stopped:
            raise ModelUnloaded("") from None

    def _over(self) -> None:
        self._long.release()
        if self._long.are_idle:
            self._rest_later(config.TOKENIZE_CHILD_IDLE_S)

    def _children_of(self, tokenizer: Tokenizer) -> Pool:
        if self._children is None or self._children[0] is not tokenizer:
            self.forget()
            first = message({"kind": "learn", **tokenizer.settings}, tokenizer.content)
            pool = Pool(self._command, first=first, first_s=config.TOKENIZE_MOST_S)
            self._children = (tokenizer, pool)
        return self._children[1]

    def _rest_later(self, delay_s: float | None) -> None:
        """End idle children after a while; None: not any more."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if delay_s is not None and self._children is not None:
            rest = self._children[1].rest
            loop = asyncio.get_running_loop()
            self._resting = loop.call_later(delay_s, lambda: loop.run_in_executor(None, rest))


async def _to_its_end(work: Awaitable[_T], over: Callable[[], None]) -> _T:
    """Return what work comes to; `over` is called at its end, whoever has left meanwhile."""
    task = asyncio.ensure_future(work)

    def end(done: asyncio.Future[_T]) -> None:
        over()
        if not done.cancelled():
            done.exception()  # whoever waits has it; where nobody does, nobody is to be warned

    task.add_done_callback(end)
    return await asyncio.shield(task)


async def _checked(text: str, field: str) -> int:
    """Return a text's bytes in UTF-8."""
    if len(text) > config.PROMPT_CHARS_MAX:
        raise InvalidRequest.of(field, f"at most {config.PROMPT_CHARS_MAX} characters")
    try:
        if text.isascii():
            nbytes = len(text)
        elif len(text) <= config.TOKENIZE_SHORT_CHARS_MAX:
            nbytes = len(text.encode())
        else:
            nbytes = await asyncio.to_thread(lambda: len(text.encode()))
    except UnicodeEncodeError as error:
        problem = f"half a character (a lone surrogate) at character {error.start}"
        raise InvalidRequest.of(field, problem) from None
    if nbytes > config.PROMPT_BYTES_MAX:
        limit = f"{nbytes} bytes in UTF-8; at most {config.PROMPT_BYTES_MAX}"
        raise InvalidRequest.of(field, limit)
    return nbytes


def _is_for_here(tokenizer: Tokenizer, text: str, nbytes: int) -> bool:
    """Tell whether a text needs no child: neither its time nor its memory can surprise."""
    if _is_short(text):
        return tokenizer.is_plain
    return tokenizer.is_modest and nbytes <= config.TOKENIZE_HERE_BYTES_MAX


def _is_short(text: str) -> bool:
    return len(text) <= config.TOKENIZE_SHORT_CHARS_MAX


def _ids_of(answer: memoryview) -> array[int]:
    ids = array(IDS)
    ids.frombytes(answer)
    return ids
