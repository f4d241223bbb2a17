"""Where texts become tokens, and tokens text, off the event loop and within an account.

Invariants:
- What is short, by a tokenizer that is `plain`, is done on a thread of this process, for nobody has
  to wait long for it: TOKENIZE_SHORTS_MAX at once. Everything else is done by a child, with
  TOKENIZE_LONGS_MAX at once, in memory of its own that is bounded, and behind whatever computes.
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
        if parse_special or not _is_short(tokenizer, text):
            how = {"kind": "text", "begin_text": begin_text, "parse_special": parse_special}
            answer = await self._asked(tokenizer, how, text, nbytes, field=field, kind=kind)
            return _ids_of(answer)

        def encode() -> array[int]:
            return array(IDS, tokenizer.encode(text, begin_text=begin_text))

        return await self._here(encode, kind, nbytes)

    async def encoded_chat(
        self, tokenizer: Tokenizer, text: str, *, nonce: str, encode: Callable[[], list[int]],
        steering: dict[str, Any],
    ) -> array[int]:  # fmt: skip
        """Return the ids of a rendered conversation, by `encode` where it is short.

        steering: what the control tokens are made of (`Tokenizer.control_tokens`).

        Raises:
            InvalidRequest, InvalidModel, QueueFull: as `encoded`.
        """
        nbytes = await _checked(text, "chat")
        if not _is_short(tokenizer, text):
            how = {"kind": "chat", "nonce": nonce, "steering": steering}
            answer = await self._asked(tokenizer, how, text, nbytes, field="chat", kind="chat")
            return _ids_of(answer)
        return await self._here(lambda: array(IDS, encode()), "chat", nbytes)

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

            return await self._here(decode, kind, ids.itemsize * len(ids))
        how = {"kind": "ids", "skip_special": skip_special}
        nbytes = ids.itemsize * len(ids)
        answer = await self._asked(tokenizer, how, ids, nbytes, field=field, kind=kind)
        if len(answer) > config.PROMPT_BYTES_MAX:
            limit = f"their text has {len(answer)} bytes; at most {config.PROMPT_BYTES_MAX}"
            raise InvalidRequest.of(field, limit)
        return answer.decode()

    def forget(self) -> None:
        """End the children: the model is on its way out."""
        self._rest_later(None)
        if self._children is not None:
            self._children[1].close()
        self._children = None

    # --- how -------------------------------------------------------------------------------------

    async def _here(self, work: Callable[[], _T], kind: str, nbytes: int) -> _T:
        """Do something short on a thread."""
        await self._short.acquire(kind, nbytes)
        return await _to_its_end(asyncio.to_thread(work), self._short.release)

    async def _asked(
        self,
        tokenizer: Tokenizer,
        how: dict[str, Any],
        body: str | array[int],
        nbytes: int,
        *,
        field: str,
        kind: str,
    ) -> bytes:
        """Return a child's answer."""
        await self._long.acquire(kind, nbytes)
        stop = Stop()
        least_s, most_s = self._limits_s
        limit_s = least_s + (most_s - least_s) * min(nbytes / config.PROMPT_BYTES_MAX, 1.0)
        self._rest_later(None)
        children = self._children_of(tokenizer)

        def ask() -> bytes:
            content = body.encode() if isinstance(body, str) else body.tobytes()
            return children.ask(message(how, content), limit_s=limit_s, stop=stop)

        try:
            answer = await _to_its_end(asyncio.to_thread(ask), self._over)
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
        if answer.startswith(BAD):
            raise InvalidModel(answer[1:].decode(), FILE)
        return answer[1:]

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


def _is_short(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.is_plain and len(text) <= config.TOKENIZE_SHORT_CHARS_MAX


def _ids_of(answer: bytes) -> array[int]:
    ids = array(IDS)
    ids.frombytes(answer)
    return ids
