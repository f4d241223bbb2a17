"""The configuration file: found, read and checked whole, or refused whole with file and key.

Invariants:
- A key that there is not, or a value of another kind, is refused by name; nothing is passed over.
- No file is no mistake, but for one that `$MLXD_CONFIG` names.
- A file that is refused stops every command that would use it, and no other: see `app`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxd_controller.cli.configuration.keys import KEYS, MODEL_KEYS, MODELS, Key
from mlxd_controller.cli.configuration.values import LEFT_OUT, OptionValue, check_value
from mlxd_shared.config import CONFIGURATION_BYTES_MAX, MODELS_MAX
from mlxd_shared.domain.errors import InvalidRequest

PATH_VARIABLE = "MLXD_CONFIG"
FILE_NAME = "mlxd/config.toml"
_BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}
_SECTIONS = frozenset(name.partition(".")[0] for name in _BY_NAME if "." in name)
_TOKENS = frozenset({"token", "client.token", "server.token", "workers.token"})


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the file and the environment say, as far as a command is concerned.

    `values` are the file's, by the keys' names, `models` those of each model; `variables` are
    those that are set. `problem` is why the file is refused; it says nothing then.
    """

    path: Path | None = None
    values: Mapping[str, OptionValue] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def defaults(self) -> dict[str, Any]:
        """Return the file's values as the command line's library takes them (`default_map`)."""
        made: dict[str, Any] = {}
        for key in KEYS:
            for option in key.options if key.name in self.values else ():
                *commands, parameter = option.split(".")
                inner = made
                for command in commands:
                    inner = inner.setdefault(command, {})
                inner[parameter] = self.values[key.name]
        return made

    def fill_environment(self, environment: MutableMapping[str, str]) -> None:
        """Set those variables to the file's values that are read elsewhere, and are not set."""
        for key in KEYS:
            if not key.options and key.name in self.values and not environment.get(key.variable):
                environment[key.variable] = str(self.values[key.name])


def find_path(environment: Mapping[str, str]) -> Path | None:
    """Return where the file is, or would be; None: none is read."""
    named = environment.get(PATH_VARIABLE)
    if named == LEFT_OUT:
        return None
    base = environment.get("XDG_CONFIG_HOME", "")
    folder = base if base.startswith("/") else "~/.config"  # XDG's rule: a relative one is ignored
    try:
        return Path(named or f"{folder}/{FILE_NAME}").expanduser().absolute()
    except RuntimeError:  # a user without a home has no file there
        return None


def load_configuration(environment: Mapping[str, str]) -> Configuration:
    """Return the configuration; of a file that is refused, why."""
    texts = {key.variable: environment.get(key.variable, "") for key in KEYS}
    variables = {variable: text for variable, text in texts.items() if text}
    path = find_path(environment)
    if path is None:
        return Configuration(variables=variables)
    try:
        tables = _read_tables(path, is_named=bool(environment.get(PATH_VARIABLE)))
        models = tables.pop(MODELS, {})
        return Configuration(
            path,
            values=dict(_check_values(tables, path)),
            models=dict(_check_models(models, path)),
            variables=variables,
        )
    except InvalidRequest as error:
        return Configuration(path, variables=variables, problem=error.describe())


def _read_tables(path: Path, *, is_named: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIGURATION_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        if is_named:
            raise InvalidRequest.of(PATH_VARIABLE, f"{path}: there is no such file") from None
        return {}
    except OSError as error:
        raise InvalidRequest.of(str(path), f"cannot be read: {error.strerror}") from error
    if len(raw) > CONFIGURATION_BYTES_MAX:
        raise InvalidRequest.of(str(path), f"at most {CONFIGURATION_BYTES_MAX} bytes are read")
    import tomllib  # noqa: PLC0415 - most commands meet no file, and are over in a moment

    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(str(path), f"is not TOML: {error}") from error


def _check_values(tables: Mapping[str, Any], path: Path) -> Iterator[tuple[str, OptionValue]]:
    for name, value in tables.items():
        if name not in _SECTIONS:
            yield name, _check(_BY_NAME.get(name), name, value, path)
            continue
        for inner, own in _table(value, name, path).items():
            whole = f"{name}.{inner}"
            yield whole, _check(_BY_NAME.get(whole), whole, own, path)


def _check_models(models: object, path: Path) -> Iterator[tuple[str, Mapping[str, OptionValue]]]:
    named = _table(models, MODELS, path)
    if len(named) > MODELS_MAX:
        raise _refusal(path, MODELS, f"{len(named)} models; at most {MODELS_MAX}")
    for model, table in named.items():
        place = f'{MODELS}."{model}"'
        yield (
            model,
            {
                name: _check(MODEL_KEYS.get(name), f"{place}.{name}", value, path)
                for name, value in _table(table, place, path).items()
            },
        )


def _check(key: Key | None, name: str, value: object, path: Path) -> OptionValue:
    if key is None:
        raise _refusal(path, name, _advise(name))
    try:
        return check_value(key, value, folder=path.parent)
    except ValueError as error:
        raise _refusal(path, name, str(error)) from error


def _table(value: object, name: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(path, name, f"is a table: write [{name}]")
    return value


def _advise(name: str) -> str:
    """Return what is wrong with a key that there is not."""
    if name in _TOKENS:
        return "a token is in a file of its own: name that with token_file"
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake alone

    model, dot, own = name.rpartition(".")
    known = MODEL_KEYS if model.startswith(f"{MODELS}.") else _BY_NAME
    near = get_close_matches(own if known is MODEL_KEYS else name, known, n=1)
    prefix = f"{model}{dot}" if known is MODEL_KEYS else ""
    return "there is no such key" + (f"; did you mean {prefix}{near[0]}?" if near else "")


def _refusal(path: Path, key: str, problem: str) -> InvalidRequest:
    return InvalidRequest.of(f"{path}: {key}", problem)
