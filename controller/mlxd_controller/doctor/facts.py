"""What the doctor judges: plain values, so that a fault can be planted as one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class State(enum.Enum):
    """What a check came to."""

    FINE = "fine"
    NOTE = "note"
    """To be known; nothing has to be done."""
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    state: State
    text: str


class PortUse(enum.Enum):
    """Who listens at an address."""

    NOBODY = "nobody"
    OURS = "a server of mlxd"
    OTHERS = "somebody else"


@dataclass(frozen=True, slots=True)
class Port:
    """An address to serve at."""

    name: str
    address: str
    use: PortUse
    problem: str = ""
    """Why nobody can listen on it, unless somebody does already."""


@dataclass(frozen=True, slots=True)
class Store:
    """A directory of models. `problem`: why it cannot be read."""

    name: str
    path: Path
    problem: str = ""
    there: bool = True
    models: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk under a directory that mlxd writes to."""

    name: str
    path: Path
    free_nbytes: int
    problem: str = ""
    """Why nothing can be written there, full or not."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A file with a token, keys or a private key. `mode`: its permissions; None: unreadable."""

    name: str
    path: Path
    mode: int | None


@dataclass(frozen=True, slots=True)
class ConfigurationFile:
    """The configuration file. `path`: None if there is none; `problem`: why it is refused."""

    path: Path | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is judged here."""

    configuration: ConfigurationFile = ConfigurationFile()

    versions: Mapping[str, str] = field(default_factory=dict)
    """As `installed_versions` has them."""
    platform: str = "linux"
    gpus: tuple[str, ...] = ()
    total_nbytes: int = 0
    available_nbytes: int = 0
    reserve_fraction: float = 0.0
    disks: tuple[Disk, ...] = ()
    ports: tuple[Port, ...] = ()
    stores: tuple[Store, ...] = ()
    secrets: tuple[Secret, ...] = ()
