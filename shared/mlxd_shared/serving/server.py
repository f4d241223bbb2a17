"""What every mlxd server has: interceptor, health, reflection, bounds, a graceful stop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.tracing import Tracer
from mlxd_shared.security.callers import CallerInterceptor
from mlxd_shared.security.listeners import OPEN, ListenerSecurity
from mlxd_shared.security.net import CLIENTS_OPTIONS, SERVER_OPTIONS, Address
from mlxd_shared.security.unix_socket import claim_socket
from mlxd_shared.serving.call_tasks import spare_batches
from mlxd_shared.serving.health import Health
from mlxd_shared.serving.traces import TraceInterceptor
from mlxd_shared.wire.admission import AdmissionInterceptor
from mlxd_shared.wire.intake import Intake
from mlxd_shared.wire.interceptors import ErrorInterceptor
from mlxd_shared.wire.proof import Proof
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, Limits

__all__ = ["Health", "add_service", "announce", "listen", "make_server", "stop"]


def make_server(
    health_of: Health,
    services: Iterable[ServiceDescriptor],
    *,
    security: ListenerSecurity = OPEN,
    limits: Limits = FROM_CLIENTS,
    calls_max: int | None = None,
    proof: Proof | None = None,
    tracer: Tracer | None = None,
) -> grpc.aio.Server:
    """Return a server with interceptors, bounds, health and reflection, not yet listening.

    Where `security` has a token or keys, no call passes without one, whatever its method. No
    request holds more than `limits`.

    calls_max: how many calls it works on at once, see `admission`; None: no bound, for a worker,
        whose one client is bounded.
    proof: what a worker's own controller sends with requests that it has checked.
    tracer: traces the calls of whoever is let in; None: nothing does.
    """
    intake = Intake(limits)
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor(intake, proof=proof)]
    options = list(SERVER_OPTIONS)
    if calls_max is not None:
        interceptors.insert(0, AdmissionInterceptor(calls_max))
        options += CLIENTS_OPTIONS
    if tracer is not None:
        interceptors.insert(0, TraceInterceptor(tracer))
    if security.needs_secret:
        interceptors.insert(0, CallerInterceptor(security))
    spare_batches(asyncio.get_running_loop())
    server = grpc.aio.server(interceptors=interceptors, options=options)
    health_pb2_grpc.add_HealthServicer_to_server(health_of, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server


def listen(
    server: grpc.aio.Server,
    address: Address,
    *,
    security: ListenerSecurity = OPEN,
    anywhere: bool = False,
) -> str:
    """Bind and return the target that clients dial (with the port that the system chose).

    `security` is the one that the server was made with. A Unix socket lies in a private folder,
    which is made if need be, and takes the place of a stale one; see unix_socket.

    Raises:
        InvalidRequest: others can reach the address, and neither `security` nor `anywhere` allows
            that; it is taken; or a Unix socket cannot be there.
    """
    security.check(address, anywhere=anywhere)
    claim = claim_socket(address.path, anywhere=anywhere) if address.is_unix else nullcontext()
    with claim:
        port = _bind(server, address, security.server_credentials())
    if address.is_unix:
        return address.target
    return f"{address.target.rpartition(':')[0]}:{port}"


def _bind(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None
) -> int:
    if not address.is_unix:
        _check_free(address)
    try:
        if credentials is None:
            return server.add_insecure_port(address.target)
        return server.add_secure_port(address.target, credentials)
    except RuntimeError as error:
        raise InvalidRequest.of("address", f"cannot listen on {address.target}") from error


def _check_free(address: Address) -> None:
    """Raise InvalidRequest where nobody can listen on a host and port, with the system's reason.

    gRPC would give none, and writes lines of its own on stderr where it fails.
    """
    host, _, port = address.target.rpartition(":")
    problems: list[OSError] = []
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise _not_listening(address, error) from error
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:  # such as a family of addresses that this machine has not
            problems.append(error)
    taken = [error for error in problems if error.errno == errno.EADDRINUSE]
    if taken or len(problems) == len(places):
        raise _not_listening(address, [*taken, *problems][0])


def _not_listening(address: Address, error: OSError) -> InvalidRequest:
    problem = f"cannot listen on {address.target}: {error.strerror or error}"
    return InvalidRequest.of("address", problem)


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Register a service; before the server starts.

    `servicer` has every method under its own name. What it answers as bytes leaves as it is:
    answers may be large, or come serialised from another server.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        read = GetMessageClass(method.input_type).FromString
        handlers[method.name] = make(getattr(servicer, method.name), read, _to_bytes)
    handler = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((handler,))


def _to_bytes(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def announce(health_of: Health, services: Iterable[ServiceDescriptor]) -> None:
    """Say that the process and its services answer."""
    for name in ("", *(service.full_name for service in services)):
        await health_of.set(name, serving=True)


async def stop(server: grpc.aio.Server, health_of: Health, *, grace_s: float) -> None:
    """Leave health, refuse new calls, give running ones `grace_s`, then end them."""
    await health_of.leave()
    await server.stop(min(grace_s, config.LOAD_TOTAL_TIMEOUT_S))
