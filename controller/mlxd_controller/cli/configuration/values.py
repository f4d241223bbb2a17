"""Values of the configuration file: each is of its key's kind, or refused with what is wrong.

Paths are relative to the folder of the file, so that it means the same wherever a command runs.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from mlxd_controller.cli.configuration.keys import Key, Kind
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.units import format_duration, parse_bytes, parse_duration
from mlxd_shared.security.net import parse_address

OptionValue: TypeAlias = str | int | float | bool | list[str]
"""What the command line's library takes for an option, in place of what a user would type."""
LEFT_OUT = "none"
LOOSE = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
_LENGTH_MAX = 80


def check_value(key: Key, value: object, *, folder: Path) -> OptionValue:
    """Return a value as the option of `key` takes it.

    Raises:
        ValueError: it is of another kind, out of range, or the file that it names is open to
            others.
    """
    checked = _CHECKS[key.kind](key, value, folder)
    if key.choices and checked not in key.choices:
        raise ValueError(f"{value!r:.{_LENGTH_MAX}} is not one of {', '.join(key.choices)}")
    return checked


def describe_value(value: OptionValue) -> str:
    """Return a value as the file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _check_text(key: Key, value: object, _folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong_kind(key, value)
    return value


def _check_texts(key: Key, value: object, folder: Path) -> list[str]:
    if not isinstance(value, list):
        raise _wrong_kind(key, value)
    return [_check_text(key, each, folder) for each in value]


def _check_flag(key: Key, value: object, _folder: Path) -> bool:
    if not isinstance(value, bool):
        raise _wrong_kind(key, value)
    return value


def _check_whole(key: Key, value: object, _folder: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_kind(key, value)
    if key.low is not None and value < key.low:
        raise ValueError(f"{value} is below {key.low}")
    if key.high is not None and value > key.high:
        raise ValueError(f"{value} is above {key.high}")
    return value


def _check_number(key: Key, value: object, _folder: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_kind(key, value)
    return float(value)


def _check_duration(key: Key, value: object, _folder: Path) -> str:
    text = _number_or_text(key, value)
    if key.high is not None and parse_duration(text) > key.high:
        raise ValueError(f"{value!r} is above {format_duration(key.high)}")
    parse_duration(text)
    return text


def _check_size(key: Key, value: object, _folder: Path) -> str:
    text = _number_or_text(key, value)
    parse_bytes(text)
    return text


def _check_size_or_none(key: Key, value: object, folder: Path) -> str:
    return LEFT_OUT if value == LEFT_OUT else _check_size(key, value, folder)


def _check_share(key: Key, value: object, folder: Path) -> str:
    text = _number_or_text(key, value)
    number = text.removesuffix("%")
    if number == text:
        return _check_size(key, value, folder)
    try:
        is_share = 0 <= float(number) < 100
    except ValueError:
        is_share = False
    if not is_share:
        raise _wrong_kind(key, value)
    return text


def _check_address(key: Key, value: object, folder: Path) -> str:
    text = _check_text(key, value, folder)
    try:
        parse_address(text)
    except InvalidRequest as error:
        raise ValueError(error.violations[0].description) from error
    return text


def _check_file(key: Key, value: object, folder: Path) -> str:
    text = _check_text(key, value, folder)
    try:
        return str(folder / Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{text!r:.{_LENGTH_MAX}}: {error}") from error


def _check_secret(key: Key, value: object, folder: Path) -> str:
    path = _check_file(key, value, folder)
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return path  # whoever reads it says what is wrong
    if mode & LOOSE:
        problem = f"{path} is open to others (mode {stat.S_IMODE(mode):04o})"
        raise ValueError(f"{problem}: chmod 600 {path}")
    return path


def _check_store(key: Key, value: object, folder: Path) -> str:
    return LEFT_OUT if value == LEFT_OUT else _check_file(key, value, folder)


def _number_or_text(key: Key, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong_kind(key, value)
    return str(value)


def _wrong_kind(key: Key, value: object) -> ValueError:
    return ValueError(f"{value!r:.{_LENGTH_MAX}} is not {key.kind.value}")


_CHECKS: Mapping[Kind, Callable[[Key, object, Path], OptionValue]] = MappingProxyType(
    {
        Kind.TEXT: _check_text,
        Kind.TEXTS: _check_texts,
        Kind.FLAG: _check_flag,
        Kind.WHOLE: _check_whole,
        Kind.NUMBER: _check_number,
        Kind.DURATION: _check_duration,
        Kind.SIZE: _check_size,
        Kind.SHARE: _check_share,
        Kind.ADDRESS: _check_address,
        Kind.FILE: _check_file,
        Kind.SECRET: _check_secret,
        Kind.SIZE_OR_NONE: _check_size_or_none,
        Kind.STORE: _check_store,
    }
)
