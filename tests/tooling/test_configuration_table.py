"""The tables of docs/configuration.md are what the code says, and so are the keys themselves."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

import configuration_table
from mlxd_controller.cli.app import app
from mlxd_controller.cli.configuration.keys import KEYS, MODEL_KEYS

UNCONFIGURED = {
    "address", "help", "model", "token_file",  # before the command, and `[models."NAME"].path`
    "detach", "log_file",  # of one start
    "hub_cache", "keep_alive", "load_timeout", "models_dir", "ollama_models",  # by variable
}  # fmt: skip
"""Options of `mlxd serve` without a key of their own."""


def parameters(group: TyperGroup, command: str) -> set[str]:
    """The parameters of a command, such as keys.add; "" is what stands before all."""
    found_at: object = group
    for name in filter(None, command.split(".")):
        found_at = getattr(found_at, "commands")[name]  # noqa: B009 - groups alone have it
    return {str(parameter.name) for parameter in getattr(found_at, "params", ())}


def test_the_tables_are_made_from_the_code() -> None:
    """`python tools/configuration_table.py` would change nothing."""
    text = configuration_table.DOCUMENT.read_text(encoding="utf-8")
    assert configuration_table.with_tables(text) == text
    assert "| `limits.keep_alive` | `MLXD_KEEP_ALIVE` | a duration" in text


def test_every_key_stands_for_options_that_exist() -> None:
    """And every option of `mlxd serve` and of what makes a load has a key."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    options = {option for key in KEYS for option in key.options}
    for option in options:
        command, _, parameter = option.rpartition(".")
        assert parameter in parameters(group, command), option
    own = {option.removeprefix("serve.") for option in options if option.startswith("serve.")}
    assert parameters(group, "serve") - own <= UNCONFIGURED
    load = {opt for parameter in group.commands["load"].params for opt in parameter.opts}
    flags = {f"--{name.replace('_', '-')}" for name in MODEL_KEYS}
    others = {"--name", "--json", "--start", "--address", "--tls-ca", "--tls-cert", "--tls-key"}
    assert flags - load == {"--path"}
    assert {opt for opt in load if opt.startswith("--")} - flags == others | {"--token-file"}


def test_every_key_has_a_name_and_a_variable_of_its_own() -> None:
    """So that none hides another."""
    names, variables = [key.name for key in KEYS], [key.variable for key in KEYS]
    assert len(set(names)) == len(names)
    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("MLXD_") for variable in variables)
