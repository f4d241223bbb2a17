"""The client's end of TLS and the token: one function that makes every channel of mlxd.

Invariants:
- A token never leaves this machine in plain text.
- What is streamed passes through nothing of ours: the token is added where a call begins, not by an
  interceptor, which would stand in the way of every message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.bearer import Token, read_token
from mlxd_shared.security.certificates import load_authorities, load_identity
from mlxd_shared.security.net import CHANNEL_OPTIONS, parse_address


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """What a caller was given. `tls_ca` (who signs servers) turns TLS on; the pair is for mTLS."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None


PLAIN = ChannelSecurity()
"""Plain text, no token."""

trace_context: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace_context", default=())
"""What calls of the current task say of the request that they are for: the headers `traceparent`
and `tracestate` of W3C's Trace Context, in lower case."""


def channel(target: str, security: ChannelSecurity = PLAIN) -> grpc.aio.Channel:
    """Return a channel to `target`, for the running event loop; it dials with its first call.

    Raises:
        InvalidRequest: options that need each other are not together, TLS is asked for on a Unix
            socket, or the token would travel in plain text to another machine.
        BadCredentials: a file cannot be used.
    """
    credentials = _credentials(security)
    address = parse_address(target)
    if address.is_unix and credentials is not None:
        raise InvalidRequest.of("tls_ca", "is for TCP, not for a Unix socket")
    options = list(CHANNEL_OPTIONS)
    if credentials is None:
        opened = grpc.aio.insecure_channel(address.target, options=options)
    else:
        opened = grpc.aio.secure_channel(address.target, credentials, options=options)
    if security.token_file is None:
        return HeaderChannel(opened)
    if credentials is None and not address.loopback:
        raise InvalidRequest.of("token_file", f"needs tls_ca: {address.target} is not loopback")
    return HeaderChannel(opened, read_token(security.token_file))


def _credentials(security: ChannelSecurity) -> grpc.ChannelCredentials | None:
    cert, key = security.tls_cert, security.tls_key
    if bool(cert) != bool(key):
        raise InvalidRequest.of("tls_key" if cert else "tls_cert", "one is needed with the other")
    if security.tls_ca is None:
        if cert:
            raise InvalidRequest.of("tls_cert", "needs tls_ca, which turns TLS on")
        return None
    authorities = load_authorities(security.tls_ca)
    identity = load_identity(cert, key) if cert and key else None
    return grpc.ssl_channel_credentials(
        root_certificates=authorities,
        private_key=identity.key if identity else None,
        certificate_chain=identity.certificates if identity else None,
    )


class HeaderChannel(grpc.aio.Channel):
    """A channel whose every call carries the token, if there is one, and `trace_context`."""

    def __init__(self, inner: grpc.aio.Channel, token: Token | None = None) -> None:
        """Own `inner`."""
        self._inner = inner
        self._headers = () if token is None else (token.header,)

    def _guard(self, call: Callable[..., Any]) -> Any:  # noqa: ANN401 - four kinds, one wrapping
        def start(*args: Any, metadata: Any = None, **options: Any) -> Any:  # noqa: ANN401
            headers = (*(metadata or ()), *self._headers, *trace_context.get())
            return call(*args, metadata=headers, **options)

        return start

    def unary_unary(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a method; see grpc.aio."""
        return self._guard(self._inner.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a method; see grpc.aio."""
        return self._guard(self._inner.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a method; see grpc.aio."""
        return self._guard(self._inner.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a method; see grpc.aio."""
        return self._guard(self._inner.stream_stream(*args, **options))

    async def close(self, grace: float | None = None) -> None:
        """End every call and the connection."""
        await self._inner.close(grace)

    def get_state(
        self,
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - the signature is gRPC's
    ) -> grpc.ChannelConnectivity:
        """Return the connection's state."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait for a connection."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
