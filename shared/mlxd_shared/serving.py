"""What every mlxd server has: interceptor, health, reflection, bounds, a graceful stop."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mlxd_shared import config
from mlxd_shared.errors import InvalidRequest
from mlxd_shared.interceptors import ErrorInterceptor
from mlxd_shared.net import SERVER_OPTIONS, Address


class Health:
    """grpc.health.v1 for "", each service, and `models/<name>`."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def set(self, name: str, *, serving: bool) -> None:
        """Say whether `name` serves now."""
        state = health_pb2.HealthCheckResponse
        await self.servicer.set(name, state.SERVING if serving else state.NOT_SERVING)

    async def leave(self) -> None:
        """Say NOT_SERVING for everything, for good: the first step of a graceful stop."""
        await self.servicer.enter_graceful_shutdown()


def make_server(health_of: Health, services: Iterable[ServiceDescriptor]) -> grpc.aio.Server:
    """Return a server with interceptor, bounds, health and reflection, not yet listening."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=list(SERVER_OPTIONS))
    health_pb2_grpc.add_HealthServicer_to_server(health_of.servicer, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server


def listen(server: grpc.aio.Server, address: Address, *, anywhere: bool = False) -> str:
    """Bind and return the target that clients dial (with the port that the system chose).

    A Unix socket's folder is private to the user, and a stale socket is removed.

    Raises:
        InvalidRequest: the address is not loopback and `anywhere` is not set, or it is taken.
    """
    if not address.loopback and not anywhere:
        raise InvalidRequest.of(
            "address", f"{address.target} is not loopback; say so with --allow-remote"
        )
    if address.is_unix:
        folder = address.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        address.path.unlink(missing_ok=True)
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError as error:
        raise InvalidRequest.of("address", f"cannot listen on {address.target}") from error
    if address.is_unix:
        return address.target
    return f"{address.target.rpartition(':')[0]}:{port}"


async def stop(server: grpc.aio.Server, health_of: Health, *, grace_s: float) -> None:
    """Leave health, refuse new calls, give running ones `grace_s`, then end them."""
    await health_of.leave()
    await server.stop(min(grace_s, config.LOAD_TOTAL_TIMEOUT_S))
