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
from typing import Any, TypeAlias

import grpc

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.certificates import load_authorities, load_identity
from mlxd_shared.security.net import CHANNEL_OPTIONS, parse_address
from mlxd_shared.security.tokens import read_token


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """What a caller was given. `tls_ca` (who signs servers) turns TLS on; the pair is for mTLS."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None


PLAIN = ChannelSecurity()
"""Plain text, no token."""

Headers: TypeAlias = tuple[tuple[str, str], ...]

call_headers: ContextVar[Headers] = ContextVar("call_headers", default=())
"""Headers, their names in lower case, of all calls of the current task: for whoever makes them on
behalf of another request. `traceparent` and `tracestate` (W3C's Trace Context) go on to workers;
`authorization` is that one's own, where the channel has no token."""


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
        return _carry_headers(opened, ())
    if credentials is None and not address.loopback:
        raise InvalidRequest.of("token_file", f"needs tls_ca: {address.target} is not loopback")
    return _carry_headers(opened, (read_token(security.token_file).header,))


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


def _carry_headers(opened: grpc.aio.Channel, headers: Headers) -> grpc.aio.Channel:
    """Have every call of a channel carry these headers, and those of `call_headers`."""
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(opened, kind, _with_headers(getattr(opened, kind), headers))
    return opened


def _with_headers(make: Callable[..., Any], headers: Headers) -> Callable[..., Any]:
    """Return what makes the methods that `make` does, each of which sends the headers."""

    def make_method(*names: Any, **codecs: Any) -> Any:  # noqa: ANN401 - four kinds, one wrapping
        call = make(*names, **codecs)

        def start(*args: Any, metadata: Any = None, **options: Any) -> Any:  # noqa: ANN401
            sent = (*(metadata or ()), *headers, *call_headers.get())
            return call(*args, metadata=sent, **options)

        return start

    return make_method
