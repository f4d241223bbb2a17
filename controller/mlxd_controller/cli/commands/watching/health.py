"""`mlxd health`: is the server ready? For container health checks, scripts and people."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer

from mlxd import RemoteError
from mlxd_controller.cli import options as o
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode, complain
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import HEALTH_TIMEOUT_S

Service = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        help="A service such as mlxd.v1.InferenceService, or models/NAME; absent: the server.",
    ),
]
Timeout = Annotated[
    float,
    o.duration_option(
        f"How long to wait for an answer.  [default: {HEALTH_TIMEOUT_S:.0f}s]", show_default=False
    ),
]


@ask_server
async def health(
    service: Service = "",
    *,
    timeout: Timeout = HEALTH_TIMEOUT_S,  # noqa: ASYNC109 - the option's name
    as_json: o.Json = False,
    where: Server,
) -> ExitCode:
    """Query the server's health (grpc.health.v1). Exit code 0: serving, 1: not yet."""
    async with where.client(timeout_s=timeout) as client:
        try:
            serving = await client.healthy(service)
        except RemoteError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            complain(f"the server has no {service!r} whose health it knows")
            return ExitCode.NOT_FOUND
    state = "SERVING" if serving else "NOT_SERVING"
    show.answer(state, {"service": service, "status": state}, as_json=as_json)
    return ExitCode.OK if serving else ExitCode.ERROR
