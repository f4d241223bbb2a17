"""`mlxd logs`: what a model's worker has written, and what it goes on to write."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import complain
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import LINES_KEPT_MAX
from mlxd_shared.ops.terminal import escape

Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Go on with each further line until the worker has ended."),
]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail",
        "-n",
        min=0,
        max=LINES_KEPT_MAX,
        help="How many of the last lines to begin with.  [default: all that are kept]",
        show_default=False,
    ),
]


@ask_server
async def logs(
    model: Annotated[str, named_model("A name, alias or digest.")],
    *,
    tail: Tail = None,
    follow: Follow = False,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """Print the last lines of a model's worker, or of its last one that failed.

    --json prints an object a message, with the lines as the worker wrote them.
    """
    async with (
        where.client() as client,
        client.read_logs(model, tail=tail, follow=follow) as pieces,
    ):
        async for piece in pieces:
            if as_json:
                show.json_line(piece)
                continue
            if piece.missed_lines:
                complain(f"{piece.missed_lines} lines were dropped before these")
            for line in piece.lines:
                typer.echo(escape(show.log_line(line, timed=True)))
