"""Who may call a router's door: this machine, and the networks that the operator trusts.

Routers of this kind send neither TLS nor a token. So an address that others can reach is served
only to networks that are named, and nothing of another caller's request is read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.bearer import Refusals
from mlxd_shared.security.net import Address
from mlxd_shared.wire.interceptors import Context, Continuation, Handler, rewrap

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
    """Lets trusted callers through. To be the first of a server's interceptors."""

    def __init__(self, trust: Trust) -> None:
        """Let those through whom `trust` allows."""
        self._trust = trust
        self._refusals = Refusals()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wrap the method's handler: only there it is known who calls."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        wrap = self._stream if handler.response_streaming else self._unary
        return rewrap(handler, wrap, request_deserializer=handler.request_deserializer)

    def _unary(self, behaviour: Any) -> Any:  # noqa: ANN401
        async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401
            await self._check(context)
            return await behaviour(request, context)

        return answer

    def _stream(self, behaviour: Any) -> Any:  # noqa: ANN401
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
            await self._check(context)
            async for message in behaviour(request, context):
                yield message

        return answer

    async def _check(self, context: Context) -> None:
        if not self._trust.allows(context.peer()):
            self._refusals.note(context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)
