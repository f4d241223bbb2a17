"""Every error over a real server: the same class and fields come back, and nothing else leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs

from mlxd_shared import config
from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import FieldViolation, InternalError, MlxdError
from mlxd_shared.wire.interceptors import Context, abort
from mlxd_shared.wire.status import TABLE, RemoteError, code_of, from_call
from tests.shared.wire.kinds import (
    KINDS,
    LIMIT_S,
    Kinds,
    call,
    failure,
    multi_callable,
    raiser,
    serving,
)

SECRET = "the prompt and a path"
EXAMPLES: tuple[MlxdError, ...] = (
    errors.InvalidRequest((FieldViolation("a.b[1]", "1 is above 0"), FieldViolation("ä", "ö"))),
    errors.FieldNotServed("migrate", "demo stays where it is"),
    errors.DuplicateRequest("r-1"),
    errors.ModelNotFound("gone", "try demo"),
    errors.NoChatTemplate("base"),
    errors.InvalidModel("not JSON", "config.json", "rope"),
    errors.PullFailed("the hub says nothing"),
    errors.PullInterrupted("cut off", 0.5),
    errors.HubUnavailable("no answer", 7.5),
    errors.HubDenied("o/m is gated"),
    errors.StoreFull("the disk is full"),
    errors.ExtraMissing("pulling", "hub"),
    errors.ModelTooLarge("big", 1 << 50, 1 << 40, 1 << 30, "a shorter context"),
    errors.NoRoom("big", 9, 8, 1.25),
    errors.QueueFull("streams", 256, 0.5),
    errors.MachineShort("open files", "config.json: Too many open files", 2.5),
    errors.DeadlinePassed(3),
    errors.ModelLoading("slow", 4.0, 0.625),
    errors.ModelDraining("going", 3.0),
    errors.ModelUnloaded("gone"),
    errors.WorkerStartFailed("bad"),
    errors.WorkerExited("bad", code=-9),
    errors.WorkerTimedOut("bad", waited_s=120.0),
    errors.LoadAbandoned("left"),
    errors.WorkerLost("lost", 17, "signal 9"),
    errors.PoisonPrompt("poisoned", 2, 600.0),
    errors.WrongWorker("w-1", "w-2"),
    errors.BackendProblem("two backends: mlx-cpu, mlx-cuda-13"),
    errors.BadCredentials("server.pem", "the certificate has expired on 2026-01-01"),
    errors.NotAllowed("editor", "the model 'big'"),
    errors.KeyLimit("editor", "requests at once", 4, 1.5),
    errors.ShuttingDown(2.0),
    errors.InternalError("abc123"),
)


def public_fields(error: MlxdError) -> dict[str, object]:
    """What of an error may travel."""
    return {name: value for name, value in vars(error).items() if name != "last_lines"}


def all_classes(root: type[MlxdError]) -> set[type[MlxdError]]:
    """Every class of the tree in mlxd_shared.domain.errors below `root`."""
    classes = {kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__}
    return classes.union(*map(all_classes, classes))


def test_the_examples_and_the_table_name_every_error() -> None:
    """An error without a row, or without a test here, does not exist."""
    tree = all_classes(MlxdError)

    assert {type(example) for example in EXAMPLES} == tree
    assert {row.error for row in TABLE} == tree
    assert len({row.reason for row in TABLE}) == len(TABLE)


@pytest.mark.asyncio
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_survives_the_wire(error: MlxdError) -> None:
    """All four kinds of method give the same class, fields, code and sentence to the client."""
    async with serving(Kinds(raiser(error))) as channel:
        for kind in KINDS:
            rpc_error = await failure(channel, kind)
            back = from_call(rpc_error)

            assert type(back) is type(error), kind
            assert public_fields(back) == public_fields(error), kind
            assert rpc_error.code() is code_of(error), kind
            assert rpc_error.details() == error.describe(), kind


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_an_error_after_a_message(kind: str) -> None:
    """A stream that fails late delivers what it had, then the error."""
    error = errors.WorkerLost("demo", 2)
    async with serving(Kinds(raiser(error), messages_first=2)) as channel:
        outgoing = iter([b""]) if kind.startswith("stream") else b""
        stream = multi_callable(channel, kind)(outgoing)
        seen = [await stream.read(), await stream.read()]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()

    assert seen == [b"message", b"message"]
    assert public_fields(from_call(caught.value)) == public_fields(error)


class Unreadable(grpc.GenericRpcHandler):
    """Methods whose requests are bytes that are no message."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def unary(request: object, context: Context) -> bytes:
            return b"answer"

        async def stream(request: object, context: Context) -> AsyncIterator[bytes]:
            yield b"message"

        read = health_pb2.HealthCheckRequest.FromString
        if details.method.endswith("unary_stream"):
            return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=read)
        return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=read)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_request_that_cannot_be_read_is_invalid(kind: str) -> None:
    """Not UNKNOWN with the name of a Python class: the caller is told what it did."""
    not_utf8 = b"\x0a\x06secret\xff"
    async with serving(Unreadable()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call(channel, kind, not_utf8), LIMIT_S)
        error = from_call(caught.value)

    assert isinstance(error, errors.InvalidRequest)
    assert [violation.field for violation in error.violations] == ["request"]
    assert "secret" not in error.describe()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_tells_its_id_and_nothing_else(kind: str) -> None:
    """An unexpected exception becomes INTERNAL; its text is in the log under the id, only there."""
    with capture_logs() as log:
        async with serving(Kinds(raiser(ValueError(SECRET)))) as channel:
            rpc_error = await failure(channel, kind)
    error = from_call(rpc_error)

    assert isinstance(error, InternalError)
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in f"{rpc_error.details()} {rpc_error.trailing_metadata()}"
    (line,) = log
    assert line["error_id"] == error.error_id
    assert str(line["exc_info"]) == SECRET


@pytest.mark.asyncio
async def test_last_lines_stay_at_home() -> None:
    """The output of a worker may hold anything: it is for the log, never for the wire."""
    error = errors.WorkerExited("demo", (SECRET,), 3)
    async with serving(Kinds(raiser(error))) as channel:
        rpc_error = await failure(channel)

    assert SECRET not in f"{rpc_error.details()} {rpc_error.trailing_metadata()}"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_success_passes_through(kind: str) -> None:
    """The interceptor leaves a call alone that has no error."""
    async with serving(Kinds(lambda: None, messages_first=1)) as channel:
        messages = await call(channel, kind)

    assert messages == ([b"message", b"last"] if kind.endswith("stream") else [b"answer"])


@pytest.mark.asyncio
async def test_an_abort_passes_through() -> None:
    """A servicer that aborts by itself is not taken for a bug."""

    class Aborting(Kinds):
        def service(
            self, details: grpc.HandlerCallDetails
        ) -> grpc.RpcMethodHandler[Any, Any] | None:
            async def unary(request: object, context: Context) -> bytes:
                await abort(context, errors.ShuttingDown(1.5))

            return grpc.unary_unary_rpc_method_handler(unary)

    async with serving(Aborting(lambda: None)) as channel:
        error = from_call(await failure(channel))

    assert public_fields(error) == {"retry_after_s": 1.5}


@pytest.mark.asyncio
async def test_a_foreign_status_passes_through() -> None:
    """What another server said is relayed with its code and message; so is an unknown method."""
    foreign = RemoteError(grpc.StatusCode.DATA_LOSS, "the disk")
    async with serving(Kinds(raiser(foreign))) as channel:
        relayed = from_call(await failure(channel))
        anonymous: Any = channel.unary_unary("/t.Kinds/nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anonymous(b"")

    assert isinstance(relayed, RemoteError)
    assert (relayed.code, relayed.message) == (grpc.StatusCode.DATA_LOSS, "the disk")
    unknown = from_call(caught.value)
    assert isinstance(unknown, RemoteError)
    assert unknown.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.asyncio
async def test_a_cancelled_call_is_no_error() -> None:
    """The handler of a client that went away gets CancelledError, and the log no line."""
    begun, ended = asyncio.Event(), asyncio.Event()

    class Waiting(Kinds):
        def service(
            self, details: grpc.HandlerCallDetails
        ) -> grpc.RpcMethodHandler[Any, Any] | None:
            async def stream(request: object, context: Context) -> AsyncIterator[bytes]:
                begun.set()
                try:
                    await asyncio.Event().wait()
                    yield b""
                finally:
                    ended.set()

            return grpc.unary_stream_rpc_method_handler(stream)

    with capture_logs() as log:
        async with serving(Waiting(lambda: None)) as channel:
            stream = multi_callable(channel, "unary_stream")(b"")
            await asyncio.wait_for(begun.wait(), LIMIT_S)
            stream.cancel()
            await asyncio.wait_for(ended.wait(), LIMIT_S)

    assert log == []


async def details_of(error: MlxdError) -> dict[str, Any]:
    """The google.rpc details of `error` as a client unpacks them, by the name of their type."""
    async with serving(Kinds(raiser(error))) as channel:
        status = rpc_status.from_call(await failure(channel))  # type: ignore[arg-type]
    assert status is not None
    details: dict[str, Any] = {}
    for detail in status.details:
        kind = detail.type_url.rpartition(".")[2]
        message = vars(error_details_pb2)[kind]()
        detail.Unpack(message)
        details[kind] = message
    return details


@pytest.mark.asyncio
async def test_generic_clients_find_the_details_they_know() -> None:
    """BadRequest, ResourceInfo, QuotaFailure and RetryInfo go where the table of codes says."""
    invalid = await details_of(EXAMPLES[0])
    missing = await details_of(errors.ModelNotFound("gone", "try demo"))
    full = await details_of(errors.NoRoom("big", 9, 8, 1.25))
    loading = await details_of(errors.ModelLoading("slow", 4.0, 0.625))
    plain = await details_of(errors.WorkerLost("lost", 17))

    assert [v.field for v in invalid["BadRequest"].field_violations] == ["a.b[1]", "ä"]
    assert missing["ResourceInfo"].resource_name == "gone"
    assert full["QuotaFailure"].violations[0].subject == "memory"
    assert full["RetryInfo"].retry_delay.ToMilliseconds() == 1250
    assert loading["ErrorInfo"].metadata["progress"] == "0.625"
    assert loading["RetryInfo"].retry_delay.seconds == 4
    assert set(plain) == {"ErrorInfo"}
    assert (plain["ErrorInfo"].domain, plain["ErrorInfo"].reason) == ("mlxd.dev", "WORKER_LOST")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest(
            tuple(
                FieldViolation(f"sampling.logit_bias[{i}]", "1000.0 is outside [-100, 100]")
                for i in range(config.LOGIT_BIAS_MAX)
            )
        ),
        errors.ModelNotFound("m" * config.MODEL_NAME_CHARS_MAX * 40),
        errors.InvalidModel("ü" * 50_000, "config.json", "x" * 50_000),
        errors.InvalidRequest.of("ü" * 50_000, "ü" * 50_000),
        errors.QueueFull("ü" * 50_000, 1),
    ],
    ids=["violations", "name", "problem", "violation", "queue"],
)
async def test_an_error_of_any_size_arrives(error: MlxdError) -> None:
    """gRPC drops a status above 8 KiB of headers: a long error is shortened, not lost."""
    async with serving(Kinds(raiser(error))) as channel:
        rpc_error = await failure(channel)

    assert rpc_error.code() is code_of(error)
    assert type(from_call(rpc_error)) is type(error)
    header_bytes = sum(
        len(key) + len(value) * 4 / 3 for key, value in rpc_error.trailing_metadata() or ()
    )
    assert header_bytes + 3 * len((rpc_error.details() or "").encode()) < 8192


@pytest.mark.asyncio
async def test_a_shortened_error_says_so() -> None:
    """What was cut ends in an ellipsis, and violations left out are counted."""
    violations = tuple(FieldViolation(f"f{i}", "x" * 100) for i in range(100))
    async with serving(Kinds(raiser(errors.InvalidRequest(violations)))) as channel:
        rpc_error = await failure(channel)
    back = from_call(rpc_error)

    assert isinstance(back, errors.InvalidRequest)
    *kept, rest = back.violations
    assert tuple(kept) == violations[: len(kept)]
    assert rest == FieldViolation("…", f"and {100 - len(kept)} more")
    assert (rpc_error.details() or "").endswith("x…")
