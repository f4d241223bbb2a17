"""Who may call a router's door: this machine, and the networks that the operator trusts.

Routers of this kind send neither TLS nor a token. So an address that others can reach is served
only to networks that are named, and nothing of another caller's request is read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.bearer import Refusals
from mlxd_shared.security.net import Address
from mlxd_shared.wire.interceptors import Context, Continuation, Handler

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
REFUSAL = "this door is for the networks that its operator trusts"
"""All that a refused caller is told."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The networks whose machines may call, besides this one."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Trust:
        """Read networks, such as 10.0.0.0/24, or single addresses.

        Raises:
            InvalidRequest: a text is neither.
        """
        networks = []
        for text in texts:
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise InvalidRequest.of("router_network", str(error)) from error
        return cls(tuple(networks))

    def check(self, address: Address) -> None:
        """Refuse an address at which routers cannot call, or that nobody is trusted to reach.

        Raises:
            InvalidRequest: naming what is missing.
        """
        if address.is_unix:
            raise InvalidRequest.of("router", "HOST:PORT: each model has a port of its own")
        if not address.loopback and not self.networks:
            problem = (
                f"{address.target} is not loopback: name the networks that are trusted with"
                " --router-network, for routers send neither TLS nor a token"
            )
            raise InvalidRequest.of("router", problem)

    def allows(self, peer: str) -> bool:
        """Return whether `peer`, as gRPC names it, may call."""
        family, _, rest = unquote(peer).partition(":")
        if family not in ("ipv4", "ipv6"):
            return False
        host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        return address.is_loopback or any(address in network for network in self.networks)


class TrustInterceptor(grpc.aio.ServerInterceptor):
    """Lets trusted callers through. To be the first of a server's interceptors.

    Who calls is known to a method's handler alone, before which gRPC reads the request. So the
    handler is one of a stream, which reads for itself, and asks the other interceptors only for
    those who are let through: nobody else takes a place or sends what is kept.
    """

    def __init__(self, trust: Trust) -> None:
        """Let those through whom `trust` allows."""
        self._trust = trust
        self._refusals = Refusals()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return a handler that serves any kind of method, once it knows who calls."""

        async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._check(context)
            handler = await continuation(handler_call_details)
            if handler is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
            await _answer(handler, requests, context)

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _check(self, context: Context) -> None:
        if not self._trust.allows(context.peer()):
            self._refusals.note(context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)


async def _answer(
    handler: Any,  # noqa: ANN401
    requests: AsyncIterator[bytes],
    context: Context,
) -> None:
    """Do what gRPC would have done with the handler of a method that takes one request."""
    taking = "stream" if handler.request_streaming else "unary"
    behaviour = getattr(handler, f"{taking}_{'stream' if handler.response_streaming else 'unary'}")
    write = handler.response_serializer or bytes
    # A refusal alone takes a stream, and reads nothing of it.
    request = requests if handler.request_streaming else await _read(handler, context)
    if not handler.response_streaming:
        await context.write(write(await behaviour(request, context)))
        return
    async with aclosing(behaviour(request, context)) as messages:
        async for message in messages:
            await context.write(write(message))


async def _read(handler: Any, context: Context) -> Any:  # noqa: ANN401
    raw = await context.read()
    if raw is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    return raw if handler.request_deserializer is None else handler.request_deserializer(raw)
