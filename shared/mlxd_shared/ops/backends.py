"""Which MLX backend is installed, and whether a worker can run at all; found without importing MLX.

On Linux exactly one backend distribution is installed: they own the same files, so with two of them
what is on disk is a mixture. On macOS `mlx` brings Metal itself.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mlxd_shared.domain.devices import CUDA_BACKENDS, DeviceKind
from mlxd_shared.domain.errors import BackendProblem

WORKER_EXTRA: Final = ("jinja2", "llguidance", "mlx", "numpy", "tokenizers")
"""What the extra `worker` brings; a backend comes beside it."""

_BACKENDS: Final = {
    "linux": {
        "mlx-cpu": DeviceKind.CPU,
        **dict.fromkeys(CUDA_BACKENDS, DeviceKind.CUDA),
    },
    "darwin": {"mlx-metal": DeviceKind.METAL},
}
_REMEDY: Final = {
    "linux": "install exactly one of mlxd[worker,cpu] and mlxd[worker,cuda13]",
    "darwin": "install mlxd[worker] on a Mac with Apple silicon",
}


@dataclass(frozen=True, slots=True)
class Installed:
    """The backend as installed."""

    kind: DeviceKind
    distribution: str
    version: str


def installed_versions() -> dict[str, str]:
    """Return the versions of what a worker needs and of MLX's backends in this environment."""
    names = [*WORKER_EXTRA, *(name for backends in _BACKENDS.values() for name in backends)]
    versions: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def choose_backend(versions: Mapping[str, str], *, platform: str) -> Installed:
    """Return the one backend among the installed distributions.

    versions: as `installed_versions` returns; platform: as `sys.platform`.

    Raises:
        BackendProblem: MLX or a backend is missing, two are there, or they are of different
        versions.
    """
    if platform not in _BACKENDS:
        raise BackendProblem(f"MLX has no backend for {platform}")
    remedy = _REMEDY[platform]
    kinds = _BACKENDS[platform]
    names = sorted(name for name in kinds if name in versions)
    if "mlx" not in versions:
        raise BackendProblem(f"MLX is not installed; {remedy}")
    if not names:
        raise BackendProblem(f"mlx {versions['mlx']} is installed without a backend; {remedy}")
    if len(names) > 1:
        both = " and ".join(names)
        message = (
            f"{both} are installed together and overwrite each other's files; uninstall them all, "
            f"then {remedy}"
        )
        raise BackendProblem(message)
    name = names[0]
    if versions[name] != versions["mlx"]:
        message = f"mlx {versions['mlx']} needs {name} of the same version, not {versions[name]}"
        raise BackendProblem(f"{message}; {remedy}")
    return Installed(kinds[name], name, versions[name])


def check_worker_installed(versions: Mapping[str, str], *, platform: str) -> None:
    """Refuse an environment in which no worker can run, such as the base install.

    versions, platform: as `choose_backend` has them.

    Raises:
        BackendProblem: what is missing, or wrong with the backend, and what to install.
    """
    missing = [name for name in WORKER_EXTRA if name not in versions]
    if missing and platform in _BACKENDS:
        message = f"no model can be loaded: {', '.join(missing)} are not installed"
        raise BackendProblem(f"{message}; {_REMEDY[platform]}")
    choose_backend(versions, platform=platform)


def check_own_worker() -> None:
    """Refuse this environment where no worker can run in it; see `check_worker_installed`."""
    check_worker_installed(installed_versions(), platform=sys.platform)
