"""How a server checks the token of every call.

A refused call reaches no handler and no other interceptor. Its answer does not depend on the
method, on whether there is such a method, nor on what was wrong with the token; the comparison
takes the same time wherever and however long the tokens differ.
"""

from __future__ import annotations

import time

import grpc

from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.tokens import HEADER, Token
from mlxd_shared.wire.interceptors import (
    HEALTH_PREFIX,
    Context,
    Continuation,
    Handler,
    refuse_unread,
)

REFUSAL = "valid credentials are needed"
"""All that a refused caller is told."""

_log = get_logger("security")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls with the token through. To be the first of a server's interceptors."""

    def __init__(self, token: Token, *, open_health: bool) -> None:
        """Guard every method, but the health service where `open_health` says so."""
        self._token = token
        self._open_prefix = HEALTH_PREFIX if open_health else None
        self._refusals = Refusals()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Ask the next interceptor, or refuse without asking."""
        metadata = handler_call_details.invocation_metadata or ()
        headers = [str(value) for key, value in metadata if key == HEADER]
        accepted = self._token.accepts(headers[0] if len(headers) == 1 else "")
        method = handler_call_details.method
        if accepted or (self._open_prefix and method.startswith(self._open_prefix)):
            return await continuation(handler_call_details)
        return refuse_unread(self._refuse)

    async def _refuse(self, context: Context) -> None:
        self._refusals.note(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


class Refusals:
    """The log of refused callers: a line at most every REFUSAL_LOG_INTERVAL_S, with the count."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._said_s = -config.REFUSAL_LOG_INTERVAL_S

    def note(self, peer: str) -> None:
        """Count one refusal; `peer` is where it came from."""
        self._unsaid += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= config.REFUSAL_LOG_INTERVAL_S:
            _log.warning("calls without valid credentials", count=self._unsaid, last_peer=peer)
            self._unsaid, self._said_s = 0, now_s
