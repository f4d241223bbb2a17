"""The probes that gather the facts: each queries one thing, and reports what it cannot find out.

Invariants:
- Nothing is changed: sockets are closed at once, and written files are removed.
- What cannot be found out is part of the answer, and no exception.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import grpc
import psutil

from mlxd import Client, MlxdError
from mlxd_controller.cli.configuration.reading import load_configuration
from mlxd_controller.doctor.facts import ConfigurationFile, Disk, Port, PortUse, Secret, Store
from mlxd_controller.memory.device import usable_gpus
from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.shelf import Place
from mlxd_controller.store.shelves import shelves_of
from mlxd_shared import config
from mlxd_shared.security.net import Address
from mlxd_shared.security.secure_channel import ChannelSecurity
from mlxd_shared.wire.status import RemoteError


def probe_configuration(environment: Mapping[str, str]) -> ConfigurationFile:
    """Read the configuration file as every command does."""
    configuration = load_configuration(environment)
    path = configuration.path
    there = path if path is not None and path.is_file() else None
    return ConfigurationFile(there, configuration.problem)


def probe_memory() -> tuple[int, int]:
    """Return all memory of this machine and what is available, in bytes."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def probe_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the products of the GPUs that can be used."""
    return tuple(f"{gpu.name} {gpu.product}" for gpu in usable_gpus(environment))


def probe_disk(name: str, path: Path) -> Disk:
    """Look at the disk under a directory, or under the nearest one that is there."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    try:
        free_nbytes = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there):
            return Disk(name, path, free_nbytes)
    except OSError as error:
        return Disk(name, path, 0, problem=f"nothing can be written: {error.strerror}")


def probe_store(name: str, path: Path, models: int) -> Store:
    """Inspect a directory of models; `models`: how many of them are known."""
    try:
        with os.scandir(path):
            return Store(name, path, models=models)
    except FileNotFoundError:
        return Store(name, path, there=False)
    except OSError as error:
        return Store(name, path, problem=error.strerror or str(error))


def probe_secret(name: str, path: Path) -> Secret:
    """Look at the permissions of a file of secrets."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return Secret(name, path, None)
    return Secret(name, path, mode if os.access(path, os.R_OK) else None)


async def probe_port(name: str, address: Address, ask: Callable[[], Awaitable[PortUse]]) -> Port:
    """Try to listen at an address; where somebody does, `ask` who."""
    try:
        free = _listens_nowhere(address)
    except OSError as error:
        return Port(name, address.target, PortUse.NOBODY, problem=error.strerror or str(error))
    if free:
        return Port(name, address.target, PortUse.NOBODY)
    return Port(name, address.target, await ask())


async def ask_server(target: str, security: ChannelSecurity) -> PortUse:
    """Return who listens: a server of ours answers, be it that it wants a token."""
    try:
        client = Client(target, security=security, timeout_s=config.DOCTOR_ANSWER_S)
        async with client:
            await client.status()
    except RemoteError as error:
        wants_token = error.code is grpc.StatusCode.UNAUTHENTICATED
        return PortUse.OURS if wants_token else PortUse.OTHERS
    except MlxdError:
        return PortUse.OTHERS
    return PortUse.OURS


def list_models(places: StorePlaces) -> list[Place]:
    """Return the models in all stores; a store that cannot be read has none."""
    models: list[Place] = []
    for shelf in shelves_of(places):
        with contextlib.suppress(MlxdError, OSError):
            models += shelf.places()
    return models


def probe_stores(places: StorePlaces) -> tuple[Store, ...]:
    """Look into each directory of models."""
    kinds = Counter(place.kind for place in list_models(places))
    stores = (
        ("mlxd's models", places.models_dir, StoreKind.MODELS),
        ("hub cache", places.hub_cache, StoreKind.HUB),
        ("Ollama's models", places.ollama, StoreKind.OLLAMA),
    )
    return tuple(
        probe_store(name, path, kinds[kind]) for name, path, kind in stores if path is not None
    )


def _listens_nowhere(address: Address) -> bool:
    """Return whether nobody listens; raises OSError if nobody can."""
    if address.is_unix:
        with socket.socket(socket.AF_UNIX) as caller:
            return caller.connect_ex(str(address.path)) != 0
    host, _, port = address.target.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), int(port)))
            listener.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
