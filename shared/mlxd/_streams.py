"""Server streams as the client sees them: read in order, checked, cancelled when left.

A stream is whole only when its reader says so: a generation ends with Finished, a load with
READY. What a reader sees is never trusted to be in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from mlxd import answers as a
from mlxd import messages as m
from mlxd.v1 import inference_pb2, model_pb2
from mlxd_shared.domain.chats import AnswerPart
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.pulls import PullProgress
from mlxd_shared.wire.convert import FINISH_FROM_PB
from mlxd_shared.wire.records import read
from mlxd_shared.wire.status import from_call

_Pb_contra = TypeVar("_Pb_contra", contravariant=True)
_Item_co = TypeVar("_Item_co", covariant=True)
_Pb = TypeVar("_Pb")
_Out = TypeVar("_Out")


class BrokenStream(MlxdError):
    """A stream that ended early, or whose messages do not follow one another."""

    problem: str
    sentence = "broken stream: {problem}"


class Reader(Protocol[_Pb_contra, _Item_co]):
    """Turns messages into items, and knows what a whole stream is."""

    def read(self, message: _Pb_contra, /) -> Sequence[_Item_co]:
        """Return the items of `message`, or raise BrokenStream."""

    def end(self) -> None:
        """Raise BrokenStream unless the stream is whole."""


class Call(Protocol):
    """A call that answers message by message: gRPC's own, or one that resumes after a loss."""

    async def read(self) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """Return the next message, or EOF.

        Raises:
            grpc.aio.AioRpcError: it has failed.
            asyncio.CancelledError: it was cancelled.
        """

    def cancel(self) -> bool:
        """End it; False where it has ended already."""


class Stream(Generic[_Out]):
    """An async iterator over one call. Leave it with `async with`, or call `aclose`.

    Raises, from `async for`: the server's error (a class of
    mlxd_shared.domain.errors, or RemoteError), or BrokenStream. Cancelling the task that reads
    cancels the call.
    """

    def __init__(self, call: Call, reader: Reader[Any, _Out]) -> None:
        self._call = call
        self._reader = reader
        self._ready: deque[_Out] = deque()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Out:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            await self._receive()
        return self._ready.popleft()

    async def _receive(self) -> None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._closed = True
            raise from_call(error) from error
        except asyncio.CancelledError:
            # Our own aclose, in another task, looks the same as this task's cancellation.
            if self._closed:
                return
            raise
        try:
            if message is grpc.aio.EOF:
                self._closed = True
                self._reader.end()
            else:
                self._ready.extend(self._reader.read(message))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Cancel what is left; the server learns of it at once. Idempotent."""
        self._closed = True
        self._ready.clear()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class GenerationReader:
    """The choices of one stream, each whole and in order, as they come."""

    def __init__(self, *, resumed: int = 0, choices: int = 1) -> None:
        """Expect `choices` choices, with these tokens already known."""
        self._resumed = resumed
        self._count = choices
        self._choices: dict[int, _ChoiceReader] = {}

    def read(self, message: inference_pb2.GenerateResponse, /) -> Sequence[a.Delta | a.Finished]:
        """Return the message's delta, if it has any text or token, and its end, if it has one."""
        if message.choice >= self._count:
            raise BrokenStream(f"choice {message.choice} came, of {self._count}")
        reader = self._choices.get(message.choice)
        if reader is None:
            reader = self._choices[message.choice] = _ChoiceReader(resumed=self._resumed)
        return reader.read(message)

    def end(self) -> None:
        """Refuse a stream in which a choice has no Finished."""
        for reader in self._choices.values() or [_ChoiceReader(resumed=self._resumed)]:
            reader.end()
        if len(self._choices) < self._count:
            raise BrokenStream(f"{len(self._choices)} choices came, of {self._count}")


class _ChoiceReader:
    """Deltas without gap or repeat, then one Finished, over as many calls as the stream takes."""

    def __init__(self, *, resumed: int) -> None:
        self._next_offset = resumed
        self._began = resumed
        self._calls = 0
        self._request_id = ""
        self._model_digest = ""
        self._finished = False

    def read(self, message: inference_pb2.GenerateResponse, /) -> Sequence[a.Delta | a.Finished]:
        """Return the message's delta, if it has any text or token, and its end, if it has one."""
        if self._finished:
            raise BrokenStream("a message came after the end")
        if message.offset != self._next_offset:
            kind = "gap" if message.offset > self._next_offset else "repeat"
            raise BrokenStream(f"{kind}: token {self._next_offset} was due, {message.offset} came")
        if message.logprobs and len(message.logprobs) != len(message.token_ids):
            count, due = len(message.logprobs), len(message.token_ids)
            raise BrokenStream(f"{count} log-probabilities for {due} tokens")
        if message.request_id:  # the first message of a call
            self._begin(message)
        self._next_offset += len(message.token_ids)
        items: list[a.Delta | a.Finished] = []
        if message.text or message.token_ids or message.parts or message.HasField("prompt"):
            items.append(_read_delta(message))
        if message.HasField("finish"):
            items.append(self._finish(message))
        return items

    def _begin(self, message: inference_pb2.GenerateResponse) -> None:
        """Note what a call's first message tells, the first call's for good."""
        self._calls += 1
        self._began = message.offset
        self._request_id = self._request_id or message.request_id
        self._model_digest = self._model_digest or message.model_digest
        if message.model_digest != self._model_digest:
            raise BrokenStream("the model has changed: the stream cannot continue")

    def _finish(self, message: inference_pb2.GenerateResponse) -> a.Finished:
        if message.finish.reason not in FINISH_FROM_PB:
            raise BrokenStream(f"finish reason {message.finish.reason} is unknown")
        if not message.HasField("usage"):
            raise BrokenStream("the end carries no usage")
        self._finished = True
        matched = message.finish.WhichOneof("matched")
        calls = a.Calls(lost=max(self._calls - 1, 0), resumed_tokens=self._began)
        return a.Finished(
            reason=FINISH_FROM_PB[message.finish.reason],
            matched=None if matched is None else getattr(message.finish, matched),
            usage=read(a.Usage, message.usage, calls=calls),
            request_id=self._request_id,
            model_digest=self._model_digest,
            choice=message.choice,
        )

    def end(self) -> None:
        """Refuse a stream without Finished."""
        if not self._finished:
            raise BrokenStream(f"it ended after {self._next_offset} tokens without a finish")


def _read_delta(message: inference_pb2.GenerateResponse) -> a.Delta:
    """Return a message's delta; by hand, because one comes with every token of every stream."""
    return a.Delta(
        offset=message.offset,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple([read(a.PositionLogprobs, pb) for pb in message.logprobs]),
        parts=tuple([read(AnswerPart, pb) for pb in message.parts]),
        seed=message.seed if message.HasField("seed") else None,
        choice=message.choice,
        prompt=read(a.PromptEcho, message.prompt) if message.HasField("prompt") else None,
        prompt_tokens=message.prompt_tokens or None,
    )


class LoadReader:
    """Updates of one load, the last of them READY."""

    def __init__(self) -> None:
        self._state = ModelState.UNKNOWN

    def read(self, message: model_pb2.LoadModelResponse, /) -> Sequence[m.LoadUpdate]:
        """Return the update."""
        update = read(m.LoadUpdate, message)
        self._state = update.model.state
        return (update,)

    def end(self) -> None:
        """Refuse a load that ended otherwise."""
        if self._state is not ModelState.READY:
            raise BrokenStream(f"the load ended in state {self._state.value}")


class PullReader:
    """Steps of one download, the last of them with its result."""

    def __init__(self) -> None:
        self._last: PullProgress | None = None

    def read(self, message: model_pb2.PullModelResponse, /) -> Sequence[PullProgress]:
        """Return the step."""
        self._last = read(PullProgress, message)
        return (self._last,)

    def end(self) -> None:
        """Refuse a download that has no result."""
        if self._last is None or self._last.pulled is None:
            raise BrokenStream("it ended before the model was there")


class EachReader(Generic[_Pb, _Out]):
    """One item a message; whole at any length."""

    def __init__(self, convert: Callable[[_Pb], _Out]) -> None:
        self._convert = convert

    def read(self, message: _Pb, /) -> Sequence[_Out]:
        """Return the one item."""
        return (self._convert(message),)

    def end(self) -> None:
        """Every end is good."""
