"""`mlxd alias`: other names for models, in mlxd's own directory; needs no running server."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import Work, ask_server
from mlxd_controller.cli.outcome import is_unreachable, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import Stores, models_dir_of
from mlxd_controller.cli.terminal import show
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import read_aliases, remove_alias, set_alias
from mlxd_controller.store.shelves import DEMO_NAME, demo_model, library_of
from mlxd_shared.domain.errors import InvalidModel, MlxdError, ModelNotFound

Alias = Annotated[
    str | None,
    typer.Argument(
        help="The new name; one that ends with * means every name that begins so and is no"
        " model's. Absent: list all aliases."
    ),
]
Target = Annotated[
    str | None, named_model("The model's name, such as ORG/NAME.", metavar="[MODEL]")
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the alias.")]
Force = Annotated[
    bool, typer.Option("--force", help="Give the alias to a model that is not there yet.")
]
ModelsDir = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="mlxd's own directory.  [default: as `mlxd serve`]"),
]


@ask_server
def alias(
    alias: Alias = None,
    model: Target = None,
    *,
    remove: Remove = False,
    force: Force = False,
    models_dir: ModelsDir = None,
    as_json: o.Json = False,
    where: Server,
) -> Work:
    """Give a model another name, or list or remove aliases. Running servers see them at once.

    The model is looked for in the stores, and at the server if one answers.
    """
    folder = models_dir or models_dir_of(os.environ)
    if folder is None:
        usage_error("no models directory: set one with --models-dir")
    folder = folder.expanduser().absolute()
    listing = alias is None and not remove
    removing = alias is not None and remove and model is None
    setting = alias is not None and model is not None and not remove
    if not (listing or removing or setting):
        usage_error("give ALIAS MODEL, or --remove ALIAS, or nothing to list them")

    async def change() -> None:
        if alias is None:
            _list(folder, as_json=as_json)
        elif model is None:
            remove_alias(folder, alias)
        else:
            if alias != model and not force:
                places = replace(Stores().places(os.environ), models_dir=folder)
                await _check_is_there(model, places, where)
            set_alias(folder, alias, model)

    return change()


async def _check_is_there(model: str, places: StorePlaces, where: Server) -> None:
    """Raise ModelNotFound where neither the stores here nor the server has a model."""
    try:
        await library_of([(DEMO_NAME, demo_model())], places).resolve(model)
    except InvalidModel:
        return  # it is there, whatever is wrong with it
    except ModelNotFound as error:
        missing = error
    else:
        return
    try:
        async with where.client() as client:  # which may have been told of folders
            await client.model(model)
    except ModelNotFound as error:
        missing = error
    except MlxdError as error:
        if not is_unreachable(error):
            raise
    else:
        return
    hint = f"{missing.hint}; with --force the alias is set all the same"
    raise ModelNotFound(missing.model, hint)


def _list(folder: Path, *, as_json: bool) -> None:
    aliases = sorted(read_aliases(folder).items())
    if as_json:
        show.json_line(dict(aliases))
    else:
        show.table(("alias", "model"), aliases)
