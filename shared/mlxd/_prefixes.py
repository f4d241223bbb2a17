"""What a server keeps on disk of prompts: have it dropped, or checked. Part of the client."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

import grpc

from mlxd._streams import EachReader, Stream
from mlxd._wire import spell
from mlxd.messages import DroppedPrefixes, VerifiedPrefixes
from mlxd.v1 import model_pb2
from mlxd.v1.model_pb2_grpc import ModelServiceStub
from mlxd_shared.wire.records import read
from mlxd_shared.wire.status import from_call

_T = TypeVar("_T")


class Prefixes:
    """The calls of an open client that concern prompts on disk; `Status` says what there is."""

    def __init__(self, opened: grpc.aio.Channel, *, timeout_s: float) -> None:
        """Ask by a channel that is open."""
        self._models = ModelServiceStub(opened)
        self._timeout_s = timeout_s

    async def drop(self, model: str) -> DroppedPrefixes:
        """Have what is kept of a model's prompts removed; return what it was.

        `model` is a name, alias or digest, or the name by which one that is not offered any more
        was loaded. An empty one is refused.
        """
        return await self._drop(spell(model_pb2.DropPrefixesRequest, model=model))

    async def drop_all(self) -> DroppedPrefixes:
        """Have all that is kept removed; return what it was."""
        return await self._drop(model_pb2.DropPrefixesRequest(all=True))

    def verify(self) -> Stream[VerifiedPrefixes]:
        """Have every file read, and those removed that are damaged; what was found, by folder."""
        call = self._models.VerifyPrefixes(model_pb2.VerifyPrefixesRequest())
        return Stream(call, EachReader(partial(read, VerifiedPrefixes)))

    async def _drop(self, request: model_pb2.DropPrefixesRequest) -> DroppedPrefixes:
        call = self._models.DropPrefixes(request, timeout=self._timeout_s)
        return read(DroppedPrefixes, await answer_of(call))


async def answer_of(call: Awaitable[_T]) -> _T:
    """Return the answer of a call that answers once; raise its error as ours."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_call(error) from error
