"""`mlxd gateway`: the HTTP APIs over a controller that runs elsewhere, in the foreground."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from mlxd_controller.cli.commands.serving.serve import allow_open_files
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import ImageUrls, NoAgentRules, Origins
from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.cli.security import GatewayListener, Reach, server
from mlxd_controller.gateway import check_usable, command_of
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.logs import LogFormat


@spread_groups
def gateway(
    context: typer.Context,
    *,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|unix:PATH", help="Where to listen; port 0 picks a free port."
        ),
    ] = config.DEFAULT_HTTP_ADDRESS,
    own: Reach,
    origin: Origins = None,
    no_agent_rules: NoAgentRules = False,
    image_urls: ImageUrls = None,
    listener: GatewayListener,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Serve everyone who can reach the address, without TLS or a token.",
        ),
    ] = False,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    log_format: LogFormat = "auto",
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama over HTTP, as a client of a server.

    --address, --tls-* and --token-file say how that server is reached; --listen-* protect what this
    serves.
    """
    try:
        check_usable(origin or (), image_urls or ())
    except InvalidRequest as error:
        usage_error(error.describe())
    where = server(context, own)
    channel = where.security
    command = command_of(
        {
            "listen": listen,
            "tls_cert": listener.listen_tls_cert,
            "tls_key": listener.listen_tls_key,
            "tls_client_ca": listener.listen_tls_client_ca,
            "token_file": listener.listen_token_file,
            "pass_keys": listener.pass_keys,
            "allow_remote": allow_remote,
            "origins": origin or [],
            "agent_rules": not no_agent_rules,
            "image_urls": image_urls or [],
            "address": where.address,
            "controller_tls_ca": channel.tls_ca,
            "controller_tls_cert": channel.tls_cert,
            "controller_tls_key": channel.tls_key,
            "controller_token_file": channel.token_file,
            "log_level": log_level,
            "log_format": log_format,
        }
    )
    allow_open_files()
    os.execv(command[0], command)  # noqa: S606 - this process becomes the gateway
