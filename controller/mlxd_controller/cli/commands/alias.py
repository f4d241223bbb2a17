"""`mlxd alias`: other names for models, in mlxd's own directory; needs no running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli import show
from mlxd_controller.cli.outcome import exit_code_of, leave, usage_error
from mlxd_controller.cli.stores import models_dir_of
from mlxd_controller.store.aliases import read_aliases, remove_alias, set_alias
from mlxd_shared.domain.errors import MlxdError

Alias = Annotated[str | None, typer.Argument(help="The new name; absent: list all aliases.")]
Target = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model's name, such as ORG/NAME.")
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the alias.")]
ModelsDir = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="mlxd's own directory.  [default: as `mlxd serve`]"),
]


def alias(
    alias: Alias = None,
    model: Target = None,
    *,
    remove: Remove = False,
    models_dir: ModelsDir = None,
    as_json: o.Json = False,
) -> None:
    """Give a model another name, or list or remove aliases. Running servers see them at once."""
    folder = models_dir or models_dir_of(os.environ)
    if folder is None:
        usage_error("no models directory: set one with --models-dir")
    folder = folder.expanduser().absolute()
    try:
        if alias is None and not remove:
            _list(folder, as_json=as_json)
        elif alias is not None and remove and model is None:
            remove_alias(folder, alias)
        elif alias is not None and model is not None and not remove:
            set_alias(folder, alias, model)
        else:
            usage_error("give ALIAS MODEL, or --remove ALIAS, or nothing to list them")
    except MlxdError as error:
        leave(error.describe(), exit_code_of(error))


def _list(folder: Path, *, as_json: bool) -> None:
    aliases = sorted(read_aliases(folder).items())
    if as_json:
        show.json_line(dict(aliases))
    else:
        show.table(("alias", "model"), aliases)
