"""Who calls: found by a call's credentials, allowed what their key is for, known to the handler.

Invariants:
- A refused call reaches no handler and no other interceptor, and nothing of its request is read.
- Without credentials that are known the answer is the same for every method and every reason. What
  a known key is not for is said.
- A method without a scope of its own is for who manages.
- A probe of health without credentials is refused as all are, but is nothing to warn of.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

import grpc

from mlxd_shared.domain.errors import NotAllowed
from mlxd_shared.security.bearer import REFUSAL, Refusals
from mlxd_shared.security.keys import ANYBODY, Caller, Scope
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.security.tokens import HEADER
from mlxd_shared.wire.interceptors import (
    HEALTH_PREFIX,
    Context,
    Continuation,
    Handler,
    abort,
    refuse_unread,
)

OWN_PREFIX: Final = "/mlxd."
_INFER, _OBSERVE, _MANAGE = map(frozenset, ([Scope.INFER], [Scope.OBSERVE], [Scope.MANAGE]))
SCOPES: Final[Mapping[str, frozenset[Scope]]] = MappingProxyType(
    {
        "/mlxd.v1.InferenceService/Generate": _INFER,
        "/mlxd.v1.InferenceService/Tokenize": _INFER,
        "/mlxd.v1.InferenceService/Detokenize": _INFER,
        "/mlxd.v1.InferenceService/Embed": _INFER,
        "/mlxd.v1.InferenceService/Score": _INFER,
        "/mlxd.v1.ModelService/ListModels": frozenset(Scope),
        "/mlxd.v1.ModelService/GetModel": frozenset(Scope),
        "/mlxd.v1.ModelService/WatchModels": _OBSERVE | _MANAGE,
        "/mlxd.v1.ModelService/ReadLogs": _OBSERVE | _MANAGE,
        "/mlxd.v1.ModelService/LoadModel": _MANAGE,
        "/mlxd.v1.ModelService/UnloadModel": _MANAGE,
        "/mlxd.v1.ModelService/ForgetModel": _MANAGE,
        "/mlxd.v1.ModelService/PullModel": _MANAGE,
        "/mlxd.v1.ModelService/DropPrefixes": _MANAGE,
        "/mlxd.v1.ModelService/VerifyPrefixes": _MANAGE,
        "/mlxd.v1.StatusService/GetStatus": _OBSERVE,
        "/mlxd.v1.StatusService/WatchStatus": _OBSERVE,
    }
)
"""Any one of a method's scopes suffices."""


current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYBODY)
"""Who has made the call that the current task works on."""


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Lets known callers through. To be the first of a server's interceptors."""

    def __init__(self, security: ListenerSecurity) -> None:
        """Know whom `security` knows: the operator by the token, others by their keys."""
        self._security = security
        self._open_prefix = HEALTH_PREFIX if security.files.open_health else None
        self._refusals = Refusals()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Ask the next interceptor, or refuse without asking."""
        method = handler_call_details.method
        if self._open_prefix and method.startswith(self._open_prefix):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        headers = [str(value) for key, value in metadata if key == HEADER]
        caller = self._security.caller_of(headers[0] if len(headers) == 1 else "")
        if caller is None:
            is_probe = not headers and method.startswith(HEALTH_PREFIX)
            return refuse_unread(_turn_away if is_probe else self._refuse)
        if method.startswith(OWN_PREFIX) and not caller.may(SCOPES.get(method, _MANAGE)):
            return refuse_unread(lambda context: self._deny(context, caller, method))
        current_caller.set(caller)  # each call has a task of its own
        return await continuation(handler_call_details)

    async def _refuse(self, context: Context) -> None:
        self._refusals.note(context.peer())
        await _turn_away(context)

    async def _deny(self, context: Context, caller: Caller, method: str) -> None:
        assert caller.key is not None
        needed = " or ".join(sorted(SCOPES.get(method, _MANAGE)))
        await abort(context, NotAllowed(caller.key.name, f"calls that need the scope {needed}"))


async def _turn_away(context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
