"""Names of models for shells to complete: the server's, within a moment, or none.

Whatever is wrong (no server, no key, a file that is refused), a shell is told nothing of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import typer

from mlxd_controller.cli.security import Reach, Server, server
from mlxd_shared.config import COMPLETION_S
from mlxd_shared.domain.errors import MlxdError


def named_model(text: str, *, metavar: str | None = None) -> Any:  # noqa: ANN401 - typer's own
    """Return an argument that is a model's name, which shells complete."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete_model)


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names and aliases that begin so, of the server that the command is for."""
    own = Reach(**{field.name: context.params.get(field.name) for field in fields(Reach)})
    try:
        names = asyncio.run(_list_names(server(context, own)))
    except (MlxdError, OSError):  # a time-out is one of these
        return []
    return [name for name in names if name.startswith(incomplete)]


async def _list_names(where: Server) -> list[str]:
    async with asyncio.timeout(COMPLETION_S), where.client() as client:
        models = await client.models()
    return sorted({name for model in models for name in (model.name, *model.aliases)})
