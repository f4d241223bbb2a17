"""`mlxd config`: which file is read, and where each value comes from; needs no running server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.configuration.keys import KEYS, MODELS, Key
from mlxd_controller.cli.configuration.reading import Configuration
from mlxd_controller.cli.configuration.values import LEFT_OUT, describe_value
from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.cli.stores import hub_cache_of, models_dir_of, ollama_of
from mlxd_controller.cli.terminal import show

config = typer.Typer(
    name="config",
    no_args_is_help=True,
    help="Show which configuration file is read, and where each value comes from.",
)
NOT_GIVEN = "-"
_HUB = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
_STORES: dict[str, tuple[Callable[[Mapping[str, str]], Path | None], tuple[str, ...]]] = {
    "stores.models_dir": (models_dir_of, ("XDG_DATA_HOME",)),
    "stores.hub_cache": (hub_cache_of, _HUB),
    "stores.ollama_models": (ollama_of, ("OLLAMA_MODELS",)),
}
"""Of stores: where each is, and the variables besides mlxd's own that say so."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value in force, and who says it: `default`, a file, a variable or a flag."""

    key: str
    value: str
    source: str


@config.command("path")
def print_path(context: typer.Context) -> None:
    """Print the path of the file that is read, or would be if it were there."""
    path = context.find_root().obj.path
    typer.echo(LEFT_OUT if path is None else str(path))


@config.command("show")
def show_settings(context: typer.Context, *, as_json: o.Json = False) -> None:
    """Print every key with its value and where that comes from: default, file, variable, flag."""
    configuration: Configuration = context.find_root().obj
    if configuration.problem:
        usage_error(configuration.problem)
    settings = [*(setting_of(key, context) for key in KEYS), *_settings_of_models(configuration)]
    if as_json:
        for setting in settings:
            show.json_line(asdict(setting))
        return
    rows = [(each.key, each.value or NOT_GIVEN, each.source) for each in settings]
    show.table(("key", "value", "from"), rows)


def setting_of(key: Key, context: typer.Context) -> Setting:
    """Return what is in force for a key before any flag behind a command."""
    root = context.find_root()
    configuration: Configuration = root.obj
    for option in key.options:
        source = root.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{option.replace('_', '-')}"
            return Setting(key.name, str(root.params[option]), f"flag {flag}")
    if key.variable in configuration.variables:
        return Setting(key.name, configuration.variables[key.variable], f"variable {key.variable}")
    if key.name in configuration.values:
        value = describe_value(configuration.values[key.name])
        return Setting(key.name, value, f"file {configuration.path}")
    if key.name not in _STORES:
        return Setting(key.name, key.default, "default")
    find, variables = _STORES[key.name]
    owner = next((name for name in variables if os.environ.get(name)), None)
    said_by = "default" if owner is None else f"variable {owner}"
    return Setting(key.name, str(find(os.environ) or LEFT_OUT), said_by)


def _settings_of_models(configuration: Configuration) -> Iterator[Setting]:
    for model, table in configuration.models.items():
        for name, value in table.items():
            place = f'{MODELS}."{model}".{name}'
            yield Setting(place, describe_value(value), f"file {configuration.path}")
