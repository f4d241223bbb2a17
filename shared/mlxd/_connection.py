"""One channel to one server, and calls over it with their errors turned into ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from mlxd.v1.inference_pb2_grpc import InferenceServiceStub
from mlxd.v1.model_pb2_grpc import ModelServiceStub
from mlxd.v1.status_pb2_grpc import StatusServiceStub
from mlxd_shared.security.secure_channel import ChannelSecurity, channel
from mlxd_shared.wire.status import from_call

if TYPE_CHECKING:  # these classes exist for the type checker only
    from mlxd.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from mlxd.v1.model_pb2_grpc import ModelServiceAsyncStub
    from mlxd.v1.status_pb2_grpc import StatusServiceAsyncStub

_T = TypeVar("_T")


class Connection:
    """The channel to `target`, which exists between `open` and `aclose` only."""

    def __init__(self, target: str, security: ChannelSecurity) -> None:
        self._target = target
        self._security = security
        self._channel: grpc.aio.Channel | None = None

    def open(self) -> None:
        """Make the channel, on the running event loop; nothing is dialled before the first call.

        Raises:
            InvalidRequest, BadCredentials: see secure_channel.
        """
        assert self._channel is None, "the client is open already"
        self._channel = channel(self._target, self._security)

    @property
    def inference(self) -> InferenceServiceAsyncStub:
        """The InferenceService."""
        return InferenceServiceStub(self._opened)

    @property
    def models(self) -> ModelServiceAsyncStub:
        """The ModelService."""
        return ModelServiceStub(self._opened)

    @property
    def status(self) -> StatusServiceAsyncStub:
        """The StatusService."""
        return StatusServiceStub(self._opened)

    def health(
        self, request: HealthCheckRequest, *, timeout_s: float
    ) -> Awaitable[HealthCheckResponse]:
        """Call Check of grpc.health.v1, whose own stub is untyped."""
        check: Callable[..., Awaitable[HealthCheckResponse]] = self._opened.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        return check(request, timeout=timeout_s)

    @property
    def _opened(self) -> grpc.aio.Channel:
        assert self._channel is not None, "use the client inside `async with`"
        return self._channel

    async def aclose(self) -> None:
        """End every call and the channel. Idempotent."""
        if self._channel is not None:
            closing, self._channel = self._channel, None
            await closing.close()


async def answer(call: Awaitable[_T]) -> _T:
    """Return the answer of a call that answers once.

    Raises:
        MlxdError: the server's error, or RemoteError.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_call(error) from error
