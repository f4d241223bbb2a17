"""What can go wrong with a request, in no API's words yet: each API writes it in its own shape.

Invariants:
- Every error of mlxd is one Failure with a status; what is none of them is a bug, and a 500.
- A field is named as its API names it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import mlxd
from mlxd_shared import config
from mlxd_shared.security.bearer import REFUSAL


class FailureKind(enum.Enum):
    """What APIs tell apart; the value is the HTTP status."""

    INVALID = 400
    UNAUTHENTICATED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    METHOD = 405
    SLOW_BODY = 408
    CONFLICT = 409
    TOO_LARGE = 413
    BUSY = 429
    BUG = 500
    NOT_SERVED = 501
    BROKEN = 502
    UNAVAILABLE = 503
    LATE = 504
    FULL = 507


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. `field` is a path in the request, such as messages[0].content; empty: none."""

    kind: FailureKind
    message: str
    field: str = ""
    retry_after_s: float | None = None


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class BadField(Refused):
    """A field that cannot be honoured, or is not what its API says."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(Failure(FailureKind.INVALID, f"{field}: {problem}", field))


def _keep(field: str) -> str:
    return field


def failure_of(error: mlxd.MlxdError, rename: Callable[[str], str] = _keep) -> Failure:
    """Return the failure that an error of mlxd is.

    rename: from a field on mlxd's wire to the request's own.
    """
    match error:
        case mlxd.InvalidRequest(violations) if violations:
            problems = [(rename(each.field), each.description) for each in violations]
            message = "; ".join(f"{field}: {problem}" for field, problem in problems)
            return Failure(FailureKind.INVALID, message, problems[0][0])
        case mlxd.FieldNotServed(field, why):
            name = rename(field)
            message = mlxd.FieldNotServed(name, why).describe()
            return Failure(FailureKind.INVALID, message, name)
        case mlxd.NoChatTemplate():
            return Failure(FailureKind.INVALID, error.describe(), rename("chat.messages"))
        case mlxd.ModelNotFound():
            return Failure(FailureKind.NOT_FOUND, error.describe(), "model")
        case mlxd.RemoteError():
            return _remote(error)
    kind = _KINDS.get(type(error), FailureKind.UNAVAILABLE)
    retry_after_s = vars(error).get("retry_after_s")
    if retry_after_s is None and kind is FailureKind.UNAVAILABLE:
        retry_after_s = config.HTTP_RETRY_S
    return Failure(kind, error.describe(), retry_after_s=retry_after_s)


_KINDS = {
    mlxd.InvalidRequest: FailureKind.INVALID,
    mlxd.InvalidModel: FailureKind.INVALID,
    mlxd.ModelTooLarge: FailureKind.INVALID,
    mlxd.PoisonPrompt: FailureKind.INVALID,
    mlxd.DuplicateRequest: FailureKind.CONFLICT,
    mlxd.NoRoom: FailureKind.BUSY,
    mlxd.QueueFull: FailureKind.BUSY,
    mlxd.MachineShort: FailureKind.BUSY,
    mlxd.KeyLimit: FailureKind.BUSY,
    mlxd.NotAllowed: FailureKind.FORBIDDEN,
    mlxd.DeadlinePassed: FailureKind.LATE,
    mlxd.BrokenStream: FailureKind.BROKEN,
    mlxd.PullFailed: FailureKind.BROKEN,
    mlxd.HubDenied: FailureKind.FORBIDDEN,
    mlxd.StoreFull: FailureKind.FULL,
    mlxd.ExtraMissing: FailureKind.NOT_SERVED,
    mlxd.InternalError: FailureKind.BUG,
}
"""Those that a client can do something about; all others pass with time."""


def _remote(error: mlxd.RemoteError) -> Failure:
    """Return the failure of a call that no controller has answered in mlxd's own words."""
    match error.code.name:
        case "UNAUTHENTICATED":
            return Failure(FailureKind.UNAUTHENTICATED, REFUSAL)
        case "UNAVAILABLE":
            message = "no controller answers"
            return Failure(FailureKind.UNAVAILABLE, message, retry_after_s=config.HTTP_RETRY_S)
        case "DEADLINE_EXCEEDED":
            return Failure(FailureKind.LATE, "the controller did not answer in time")
        case "RESOURCE_EXHAUSTED":
            return Failure(FailureKind.TOO_LARGE, "the request is larger than a controller takes")
        case _:
            return Failure(FailureKind.BROKEN, "the controller cannot be used by this gateway")
