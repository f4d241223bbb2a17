"""Errors to gRPC status with google.rpc details, and back: one table for both directions.

Every error travels as one ErrorInfo whose metadata are the error's fields, plus the detail that
generic clients know (BadRequest, RetryInfo, ResourceInfo, QuotaFailure). `last_lines` stays here.
Texts are shortened to what the headers of a call may carry: a status too long would be lost whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.wire.records import duration_to_pb

DOMAIN = "mlxd.dev"
_PRIVATE_FIELDS = frozenset({"last_lines", "violations"})


@dataclass(frozen=True, slots=True)
class Row:
    """How one class of error looks on the wire."""

    error: type[e.MlxdError]
    code: grpc.StatusCode
    reason: str


_C = grpc.StatusCode
TABLE = (
    Row(e.InvalidRequest, _C.INVALID_ARGUMENT, "INVALID_REQUEST"),
    Row(e.FieldNotServed, _C.UNIMPLEMENTED, "FIELD_NOT_SERVED"),
    Row(e.DuplicateRequest, _C.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    Row(e.ModelNotFound, _C.NOT_FOUND, "MODEL_NOT_FOUND"),
    Row(e.NoChatTemplate, _C.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE"),
    Row(e.InvalidModel, _C.FAILED_PRECONDITION, "MODEL_INVALID"),
    Row(e.PullFailed, _C.FAILED_PRECONDITION, "PULL_FAILED"),
    Row(e.PullInterrupted, _C.UNAVAILABLE, "PULL_INTERRUPTED"),
    Row(e.HubUnavailable, _C.UNAVAILABLE, "HUB_UNAVAILABLE"),
    Row(e.HubDenied, _C.FAILED_PRECONDITION, "HUB_DENIED"),
    Row(e.StoreFull, _C.RESOURCE_EXHAUSTED, "STORE_FULL"),
    Row(e.ExtraMissing, _C.UNIMPLEMENTED, "EXTRA_MISSING"),
    Row(e.ModelTooLarge, _C.FAILED_PRECONDITION, "MODEL_TOO_LARGE"),
    Row(e.NoRoom, _C.RESOURCE_EXHAUSTED, "NO_ROOM"),
    Row(e.QueueFull, _C.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    Row(e.MachineShort, _C.RESOURCE_EXHAUSTED, "MACHINE_SHORT"),
    Row(e.DeadlinePassed, _C.DEADLINE_EXCEEDED, "DEADLINE_PASSED"),
    Row(e.ModelLoading, _C.UNAVAILABLE, "MODEL_LOADING"),
    Row(e.ModelDraining, _C.UNAVAILABLE, "MODEL_DRAINING"),
    Row(e.ModelUnloaded, _C.ABORTED, "MODEL_UNLOADED"),
    Row(e.WorkerExited, _C.UNAVAILABLE, "WORKER_EXITED"),
    Row(e.WorkerTimedOut, _C.UNAVAILABLE, "WORKER_TIMED_OUT"),
    Row(e.WorkerStartFailed, _C.UNAVAILABLE, "WORKER_START_FAILED"),
    Row(e.LoadAbandoned, _C.CANCELLED, "LOAD_ABANDONED"),
    Row(e.WorkerLost, _C.UNAVAILABLE, "WORKER_LOST"),
    Row(e.PoisonPrompt, _C.FAILED_PRECONDITION, "POISON_PROMPT"),
    Row(e.WrongWorker, _C.FAILED_PRECONDITION, "WRONG_WORKER"),
    Row(e.BackendProblem, _C.FAILED_PRECONDITION, "BACKEND_PROBLEM"),
    Row(e.BadCredentials, _C.FAILED_PRECONDITION, "BAD_CREDENTIALS"),
    Row(e.NotAllowed, _C.PERMISSION_DENIED, "NOT_ALLOWED"),
    Row(e.KeyLimit, _C.RESOURCE_EXHAUSTED, "KEY_LIMIT"),
    Row(e.ShuttingDown, _C.UNAVAILABLE, "SHUTTING_DOWN"),
    Row(e.InternalError, _C.INTERNAL, "INTERNAL"),
)
_BY_CLASS = {row.error: row for row in TABLE}
_BY_REASON = {row.reason: row for row in TABLE}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def code_of(error: e.MlxdError) -> grpc.StatusCode:
    """Return the status code that `error` travels under."""
    return _BY_CLASS[type(error)].code


def end_code(error: BaseException | None) -> grpc.StatusCode:
    """Return the status code that a call ends with whose handler raised `error`, if anything."""
    match error:
        case None:
            return grpc.StatusCode.OK
        case RemoteError(code):
            return code
        case e.MlxdError():
            return code_of(error)
        case asyncio.CancelledError() | GeneratorExit():
            return grpc.StatusCode.CANCELLED
        case _:
            return grpc.StatusCode.INTERNAL


def to_status(error: e.MlxdError) -> status_pb2.Status:
    """Return `error` as google.rpc.Status with its details."""
    row = _BY_CLASS[type(error)]
    info = error_details_pb2.ErrorInfo(
        reason=row.reason, domain=DOMAIN, metadata=_metadata_of(error)
    )
    details = []
    for detail in (info, *_extras(error)):
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)
    number: int = row.code.value[0]
    return status_pb2.Status(code=number, message=shorten(error.describe()), details=details)


def _metadata_of(error: e.MlxdError) -> dict[str, str]:
    assert dataclasses.is_dataclass(error)
    return {
        name: shorten(str(value))
        for name, value in vars(error).items()
        if name not in _PRIVATE_FIELDS and not name.startswith("_")
    }


def _extras(error: e.MlxdError) -> list[Message]:
    match error:
        case e.InvalidRequest(violations):
            field = error_details_pb2.BadRequest.FieldViolation
            fields = [field(field=v.field, description=v.description) for v in _first(violations)]
            return [error_details_pb2.BadRequest(field_violations=fields)]
        case e.ModelNotFound(model):
            return [
                error_details_pb2.ResourceInfo(
                    resource_type="model",
                    resource_name=shorten(model),
                    description=shorten(error.describe()),
                )
            ]
        case e.NoRoom() | e.QueueFull() | e.MachineShort() | e.KeyLimit():
            quota = error_details_pb2.QuotaFailure.Violation
            subject = shorten(_subject(error))
            violation = quota(subject=subject, description=shorten(error.describe()))
            return [
                error_details_pb2.QuotaFailure(violations=[violation]),
                _retry(error.retry_after_s),
            ]
        case e.StoreFull(problem):
            full = error_details_pb2.QuotaFailure.Violation(
                subject="disk", description=shorten(problem)
            )
            return [error_details_pb2.QuotaFailure(violations=[full])]
        case (
            e.ModelLoading()
            | e.ModelDraining()
            | e.PullInterrupted()
            | e.HubUnavailable()
            | e.ShuttingDown()
        ):
            return [_retry(error.retry_after_s)]
        case _:
            return []


def _subject(error: e.NoRoom | e.QueueFull | e.MachineShort | e.KeyLimit) -> str:
    """Return what there is too little of."""
    match error:
        case e.NoRoom():
            return "memory"
        case e.QueueFull():
            return error.queue
        case e.MachineShort():
            return error.resource
        case e.KeyLimit():
            return error.what


def shorten(text: str, nbytes: int = config.STATUS_TEXT_BYTES_MAX) -> str:
    """Return `text`, or as much of it as `nbytes` of UTF-8 hold, with an ellipsis.

    What is no text at all, half a surrogate pair, is written as its escape.
    """
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= nbytes:
        return encoded.decode()
    ellipsis = "…"
    kept = encoded[: nbytes - len(ellipsis.encode())]
    return kept.decode(errors="ignore") + ellipsis


def _first(violations: tuple[e.FieldViolation, ...]) -> list[e.FieldViolation]:
    """Return the violations that fit, and one that counts the rest."""
    kept: list[e.FieldViolation] = []
    left = config.STATUS_VIOLATIONS_BYTES_MAX
    for violation in violations:
        short = e.FieldViolation(shorten(violation.field), shorten(violation.description))
        left -= len(short.field.encode()) + len(short.description.encode())
        if left < 0:
            more = len(violations) - len(kept)
            return [*kept, e.FieldViolation("…", f"and {more} more")]
        kept.append(short)
    return kept


def _retry(after_s: float) -> Message:
    retry: Message = error_details_pb2.RetryInfo(retry_delay=duration_to_pb(after_s))
    return retry


class RemoteError(e.MlxdError):
    """A status of another server, or of gRPC itself, that carries none of our reasons."""

    code: grpc.StatusCode
    message: str
    sentence = "{code.name}: {message}"


def from_status(status: status_pb2.Status) -> e.MlxdError:
    """Return the error that `to_status` was given, or RemoteError for a foreign status."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
    row = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    if row is None:
        return RemoteError(_BY_NUMBER[status.code], status.message)
    if row.error is e.InvalidRequest:
        violations = (
            e.FieldViolation(v.field, v.description) for v in bad_request.field_violations
        )
        return e.InvalidRequest(tuple(violations))
    return _rebuild(row.error, dict(info.metadata))


def to_bytes(error: e.MlxdError) -> bytes:
    """Return `error` for another process of mlxd's to read with `from_bytes`."""
    raw: bytes = to_status(error).SerializeToString()
    return raw


def from_bytes(raw: bytes) -> e.MlxdError:
    """Return the error that `to_bytes` was given."""
    return from_status(status_pb2.Status.FromString(raw))


_READERS = {"str": str, "int": int, "float": float}


def _rebuild(error: type[e.MlxdError], metadata: dict[str, str]) -> e.MlxdError:
    assert dataclasses.is_dataclass(error)
    arguments = {
        field.name: _READERS[str(field.type)](metadata[field.name])
        for field in dataclasses.fields(error)
        if field.name not in _PRIVATE_FIELDS and field.name in metadata
    }
    return error(**arguments)


def from_call(error: grpc.RpcError) -> e.MlxdError:
    """Return the domain error behind a failed call (grpc.aio.AioRpcError)."""
    assert isinstance(error, grpc.aio.AioRpcError)
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            return from_status(status_pb2.Status.FromString(value))
    return RemoteError(error.code(), error.details() or "")
