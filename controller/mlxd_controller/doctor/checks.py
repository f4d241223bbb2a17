"""The checks: each a pure function from facts to findings, and a line in `CHECKS`. No effects."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Final

from mlxd_controller.doctor.facts import Facts, Finding, PortUse, State
from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.ops.backends import check_worker_installed, choose_backend

Check = Callable[[Facts], Iterator[Finding]]
LOOSE: Final = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
"""What a secret's permissions must not have."""


def check_configuration(facts: Facts) -> Iterator[Finding]:
    """The configuration file is not refused: every command but a few would end at once."""
    file = facts.configuration
    if file.problem:
        yield Finding("configuration", State.FAULT, f"{file.problem} (looked at without it)")
    else:
        text = "there is no file" if file.path is None else str(file.path)
        yield Finding("configuration", State.FINE, text)


def check_backend(facts: Facts) -> Iterator[Finding]:
    """Exactly one backend of MLX is installed, with all that a worker needs beside it."""
    try:
        check_worker_installed(facts.versions, platform=facts.platform)
    except BackendProblem as problem:
        yield Finding("backend", State.FAULT, problem.describe())
        return
    backend = choose_backend(facts.versions, platform=facts.platform)
    yield Finding("backend", State.FINE, f"{backend.distribution} {backend.version}")


def check_device(facts: Facts) -> Iterator[Finding]:
    """Where the backend is for GPUs there is one that can be used."""
    try:
        kind = choose_backend(facts.versions, platform=facts.platform).kind
    except BackendProblem:
        return  # which is the backend's finding
    if kind is not DeviceKind.CUDA:
        yield Finding("device", State.FINE, kind.value)
    elif facts.gpus:
        yield Finding("device", State.FINE, ", ".join(facts.gpus))
    else:
        text = "a backend for CUDA is installed, and no GPU can be used: see nvidia-smi"
        yield Finding("device", State.FAULT, text)


def check_memory(facts: Facts) -> Iterator[Finding]:
    """A small model has room beside what others hold and the reserve."""
    usable = facts.available_nbytes - int(facts.total_nbytes * facts.reserve_fraction)
    text = (
        f"{format_bytes(facts.available_nbytes)} of {format_bytes(facts.total_nbytes)} available,"
        f" {format_bytes(max(usable, 0))} of it for models"
    )
    if usable >= config.DOCTOR_MEMORY_BYTES_MIN:
        yield Finding("memory", State.FINE, text)
    else:
        least = format_bytes(config.DOCTOR_MEMORY_BYTES_MIN)
        yield Finding("memory", State.FAULT, f"{text}; a small model needs {least}")


def check_disks(facts: Facts) -> Iterator[Finding]:
    """What mlxd writes has room: names, findings, downloads, sockets."""
    for disk in facts.disks:
        text = f"{disk.name} {disk.path}: {format_bytes(disk.free_nbytes)} free"
        if disk.problem:
            yield Finding("disk", State.FAULT, f"{disk.name} {disk.path}: {disk.problem}")
        elif disk.free_nbytes < config.DOCTOR_DISK_BYTES_MIN:
            least = format_bytes(config.DOCTOR_DISK_BYTES_MIN)
            yield Finding("disk", State.FAULT, f"{text}, at least {least} are needed")
        else:
            yield Finding("disk", State.FINE, text)


def check_ports(facts: Facts) -> Iterator[Finding]:
    """A server can listen, or does already."""
    for port in facts.ports:
        at = f"{port.name} {port.address}"
        if port.problem:
            yield Finding("port", State.FAULT, f"{at}: {port.problem}")
        elif port.use is PortUse.OTHERS:
            yield Finding("port", State.FAULT, f"{at} is taken by {port.use.value}")
        elif port.use is PortUse.OURS:
            yield Finding("port", State.NOTE, f"{port.use.value} listens at {at}")
        else:
            yield Finding("port", State.FINE, f"{at} is free")


def check_stores(facts: Facts) -> Iterator[Finding]:
    """Each store of models can be read; one that is not there is empty."""
    for store in facts.stores:
        at = f"{store.name} {store.path}"
        if store.problem:
            yield Finding("store", State.FAULT, f"{at} cannot be read: {store.problem}")
        elif not store.there:
            yield Finding("store", State.NOTE, f"{at} is not there")
        else:
            count = "1 model" if store.models == 1 else f"{store.models} models"
            yield Finding("store", State.FINE, f"{at}: {count}")


def check_secrets(facts: Facts) -> Iterator[Finding]:
    """Nobody else can read a file of secrets, or write to it."""
    if not facts.secrets:
        yield Finding("secrets", State.FINE, "no token, keys or private key are named")
    for secret in facts.secrets:
        if secret.mode is None:
            yield Finding("secrets", State.FAULT, f"{secret.name} {secret.path} cannot be read")
        elif secret.mode & LOOSE:
            text = f"{secret.name} {secret.path} is open to others ({secret.mode:o}): chmod 600"
            yield Finding("secrets", State.FAULT, text)
        else:
            yield Finding("secrets", State.FINE, f"{secret.name} {secret.path} ({secret.mode:o})")


CHECKS: Final[tuple[Check, ...]] = (
    check_configuration,
    check_backend,
    check_device,
    check_memory,
    check_disks,
    check_ports,
    check_stores,
    check_secrets,
)
"""In the order of the report."""


def judge(facts: Facts) -> list[Finding]:
    """Return what all checks find."""
    return [finding for check in CHECKS for finding in check(facts)]
