"""`mlxd embed`: texts in, vectors out, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.commands.prompts.generate import ModelName
from mlxd_controller.cli.grouping import Work, ask_or_start_server
from mlxd_controller.cli.outcome import read_lines
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import EMBED_TEXTS_MAX
from mlxd_shared.domain.requests import Pooling

Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT]...", help="Texts to embed; absent: the lines of standard input."
    ),
]
PoolingOption = Annotated[
    Pooling | None,
    typer.Option("--pooling", help="Hidden states that form the vector.  [default: the model's]"),
]
Dimensions = Annotated[
    int | None,
    typer.Option(min=0, max=(1 << 32) - 1, help="Shorten each vector.  [default: all dimensions]"),
]
Normalize = Annotated[
    bool | None,
    typer.Option(
        "--normalize/--no-normalize",
        help="Scale each vector to length 1.  [default: as the model's files say, else yes]",
        show_default=False,
    ),
]


@ask_or_start_server
def embed(
    model: ModelName,
    text: Texts = None,
    *,
    pooling: PoolingOption = None,
    dimensions: Dimensions = None,
    normalize: Normalize = None,
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Print one vector per line, one for each text; loads the model if necessary."""
    texts = text or read_lines("no text")  # before the event loop, which Ctrl-C cancels and no more

    async def ask() -> None:
        async with where.client() as client:
            for begin in range(0, len(texts), EMBED_TEXTS_MAX):
                vectors = await client.embed(
                    texts[begin : begin + EMBED_TEXTS_MAX],
                    model=model,
                    pooling=pooling,
                    dimensions=dimensions,
                    normalize=normalize,
                )
                for vector in vectors:
                    _print(vector, as_json=as_json)

    return ask()


def _print(vector: Sequence[float], *, as_json: bool) -> None:
    shortest = [f"{value:.9g}" for value in vector]  # what tells floats of 32 bits apart
    show.answer(" ".join(shortest), [float(text) for text in shortest], as_json=as_json)
