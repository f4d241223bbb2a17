"""From a request's bytes to its struct: within bounds, strictly, naming what is wrong.

Invariants:
- Of a caller that the controller does not know nothing is read.
- A body is never longer in memory than HTTP_BODY_BYTES_MAX, whatever its head says, and has all
  come within HTTP_BODY_S; those that are being read take at most their `Room` together.
- What is not JSON, not of the struct's types, or a field that the struct has not is BadField.
- All of a body is UTF-8, what is kept as JSON text too, into which nobody looks here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from mlxd_gateway.common.callers import Callers
from mlxd_gateway.common.failures import BadField, Failure, FailureKind, Refused
from mlxd_gateway.common.fates import let_go, refuse
from mlxd_shared import config

_T = TypeVar("_T", bound=msgspec.Struct)
_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>.*)`")


class Room:
    """What bodies take in memory while they are being read, of all requests together."""

    def __init__(self, nbytes: int) -> None:
        """Let bodies take `nbytes` at once."""
        self._nbytes = nbytes
        self._free_nbytes = nbytes

    @contextmanager
    def lend(self) -> Iterator[Callable[[int], None]]:
        """Yield what takes so many bytes more for one body; they are free again behind the block.

        What is yielded raises Refused, with a time to retry, where there is no room now.
        """
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            if nbytes > self._free_nbytes:
                message = f"bodies of {self._nbytes} bytes are being read"
                failure = Failure(FailureKind.BUSY, message, retry_after_s=config.HTTP_RETRY_S)
                raise Refused(failure)
            self._free_nbytes -= nbytes
            taken += nbytes

        try:
            yield take
        finally:
            self._free_nbytes += taken


def _keep(body: bytes) -> bytes:
    return body


def reader_of(
    kind: type[_T], *, prepare: Callable[[bytes], bytes] = _keep
) -> Callable[[Request], Coroutine[Any, Any, _T]]:
    """Return a function that reads a request's body, as `prepare` leaves it, as `kind`.

    It raises Refused where nobody knows the caller, the body is too large, too slow or not JSON, or
    there is no room for it, BadField for a field, and starlette's ClientDisconnect where the client
    goes. The request's `state.body_nbytes` says how long its body was.
    """
    decoder = msgspec.json.Decoder(kind)

    async def read(request: Request) -> _T:
        callers: Callers = request.app.state.callers
        await callers.check()
        room: Room = request.app.state.room
        with room.lend() as take:
            body = await read_body(request, take)
            request.state.body_nbytes = len(body)
            struct = decode(decoder, prepare(body))
        refuse(struct)
        let_go(struct)
        return struct

    return read


def query_reader_of(kind: type[_T]) -> Callable[[Request], _T]:
    """Return a function that reads the query of a request's URL as `kind`; `a[]` is `a` too.

    It raises BadField for a field.
    """
    decoder = msgspec.json.Decoder(kind, strict=False)

    def read(request: Request) -> _T:
        fields = {name.removesuffix("[]"): text for name, text in request.query_params.items()}
        struct = decode(decoder, msgspec.json.encode(fields))
        refuse(struct)
        return struct

    return read


async def read_body(request: Request, take: Callable[[int], None]) -> bytes:
    """Return a request's body, for whose bytes `take` is called as they come.

    Raises:
        Refused: it is too long, or does not come; or `take` raises it.
        ClientDisconnect: the client has gone.
    """
    limit = config.HTTP_BODY_BYTES_MAX
    too_large = Refused(Failure(FailureKind.TOO_LARGE, f"a body has at most {limit} bytes"))
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise too_large
    chunks: list[bytes] = []
    nbytes = 0
    try:
        async with asyncio.timeout(config.HTTP_BODY_S):
            async for chunk in request.stream():
                nbytes += len(chunk)
                if nbytes > limit:
                    raise too_large
                take(len(chunk))
                chunks.append(chunk)
    except TimeoutError as error:
        message = f"the body did not come within {config.HTTP_BODY_S:.0f} s"
        raise Refused(Failure(FailureKind.SLOW_BODY, message)) from error
    return b"".join(chunks)


def decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Return the struct that `body` spells.

    Raises:
        BadField: it spells none; names the field where there is one.
    """
    try:
        body.decode()  # msgspec passes over what it keeps as it is
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise describe_violation(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(Failure(FailureKind.INVALID, f"the body is not JSON: {error}")) from error
    except RecursionError as error:
        raise Refused(Failure(FailureKind.INVALID, "the body is nested too deep")) from error


def describe_violation(text: str) -> BadField:
    """Return the error that msgspec describes as `PROBLEM - at `$.PATH``, which names the field."""
    match = _PATH.match(text)
    assert match is not None  # it matches any text
    path = (match["path"] or "").removeprefix(".")
    problem = match["problem"]
    named = _NAMED.fullmatch(problem)
    if named is None:
        return BadField(path or "body", problem[:1].lower() + problem[1:])
    path = f"{path}.{named['name']}" if path else named["name"]
    return BadField(path, "is no field" if "unknown" in problem else "is needed")
