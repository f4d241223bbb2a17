"""What a client has of a server: one channel, open for as long as the client is."""

from __future__ import annotations

from typing import Self

import grpc

from mlxd_shared import config
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity, channel


class Connection:
    """The channel of a `Client`, whose docstring says what is what."""

    def __init__(
        self,
        address: str = config.DEFAULT_ADDRESS,
        *,
        security: ChannelSecurity = PLAIN,
        timeout_s: float = config.CLIENT_TIMEOUT_S,
    ) -> None:
        self._target = parse_address(address).target
        self._security = security
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        assert self._channel is None, "the client is open already"
        self._channel = channel(self._target, self._security)  # dials with the first call
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every call in progress and the connection. Idempotent."""
        if self._channel is not None:
            closing, self._channel = self._channel, None
            await closing.close()

    @property
    def _opened(self) -> grpc.aio.Channel:
        assert self._channel is not None, "use the client inside `async with`"
        return self._channel
