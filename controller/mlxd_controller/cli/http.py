"""The HTTP gateway on the command line: `mlxd serve`, `mlxd gateway` and `mlxd launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlxd_controller.cli.router import FLAG as ROUTER_FLAG
from mlxd_shared import config

PANEL = "HTTP"
FLAG = "--http"
ALONE = {FLAG: config.DEFAULT_HTTP_ADDRESS, ROUTER_FLAG: config.DEFAULT_ROUTER_ADDRESS}
"""The flags of `mlxd serve` that may stand without an address, and the one that they mean then."""
_REST = "mlxd.rest_of_line"
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--http-origin",
        metavar="ORIGIN",
        help="Let pages of this origin, such as https://chat.example, use the HTTP APIs from a"
        " browser; repeatable.  [default: none]",
        rich_help_panel=PANEL,
    ),
]
NoAgentRules = Annotated[
    bool,
    typer.Option(
        "--no-agent-rules",
        help="Leave chats as they are sent: by default what agents change from turn to turn goes"
        " behind what stays, so that prefixes stay equal.",
        rich_help_panel=PANEL,
    ),
]
ImageUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--image-urls",
        metavar="HOST|public",
        help="Fetch images at http(s) addresses of this host (*.HOST: of those below it; public: of"
        " all), if its addresses are public; repeatable.  [default: none is fetched]",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Http:
    """The gateway beside a controller."""

    http: Annotated[
        str | None,
        typer.Option(
            FLAG,
            metavar="[HOST:PORT]",
            help="Serve the APIs of OpenAI, Anthropic and Ollama over HTTP too, with the same TLS"
            f" and token; without an address at {config.DEFAULT_HTTP_ADDRESS}. Needs the extra"
            " http.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None
    http_origin: Origins = None
    no_agent_rules: NoAgentRules = False
    image_urls: ImageUrls = None


class ServeCommand(TyperCommand):
    """`mlxd serve`, some of whose flags may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's own
        """Read the command line."""
        return super().parse_args(ctx, complete_flag(args))


def complete_flag(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with the default address behind each of `ALONE` that has none."""
    completed: list[str] = []
    for index, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[index + 1 : index + 2]
        if argument in ALONE and (not following or following[0].startswith("-")):
            completed.append(ALONE[argument])
    return completed


class LaunchCommand(TyperCommand):
    """`mlxd launch`, on whose line another program's arguments follow `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's own
        """Read the command line up to `--`, and keep the rest as it is."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_REST] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


def rest_of_line(context: typer.Context) -> tuple[str, ...]:
    """Return what follows `--` on the line of a `LaunchCommand`."""
    rest: tuple[str, ...] = context.meta[_REST]
    return rest
