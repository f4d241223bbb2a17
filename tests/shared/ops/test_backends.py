"""Which backend is installed, and whether a worker can run, told from what is installed alone."""

from __future__ import annotations

import sys

import pytest

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.ops.backends import (
    WORKER_EXTRA,
    check_own_worker,
    check_worker_installed,
    choose_backend,
    installed_versions,
)


@pytest.mark.parametrize(
    ("versions", "platform", "kind"),
    [
        ({"mlx": "1", "mlx-cpu": "1"}, "linux", DeviceKind.CPU),
        ({"mlx": "1", "mlx-cuda-13": "1"}, "linux", DeviceKind.CUDA),
        ({"mlx": "1", "mlx-cuda-12": "1"}, "linux", DeviceKind.CUDA),
        ({"mlx": "1", "mlx-metal": "1"}, "darwin", DeviceKind.METAL),
    ],
)
def test_the_one_backend_is_found(
    versions: dict[str, str], platform: str, kind: DeviceKind
) -> None:
    """With exactly one backend of MLX's version, it is the one."""
    installed = choose_backend(versions, platform=platform)
    assert (installed.kind, installed.version) == (kind, "1")
    assert installed.distribution in versions


@pytest.mark.parametrize(
    ("versions", "platform", "words"),
    [
        ({}, "linux", ["MLX is not installed", "mlxd[worker,cpu]", "mlxd[worker,cuda13]"]),
        ({"mlx": "1"}, "linux", ["without a backend", "mlxd[worker,cpu]"]),
        ({"mlx-cpu": "1"}, "linux", ["MLX is not installed"]),
        ({"mlx": "1", "mlx-metal": "1"}, "linux", ["without a backend"]),
        (
            {"mlx": "1", "mlx-cpu": "1", "mlx-cuda-13": "1"},
            "linux",
            ["mlx-cpu and mlx-cuda-13", "uninstall them all"],
        ),
        ({"mlx": "2", "mlx-cpu": "1"}, "linux", ["mlx 2", "mlx-cpu", "not 1"]),
        ({"mlx": "1"}, "darwin", ["without a backend", "Apple silicon"]),
        ({"mlx": "1", "mlx-cpu": "1"}, "win32", ["no backend for win32"]),
    ],
)
def test_none_or_two_backends_are_an_error(
    versions: dict[str, str], platform: str, words: list[str]
) -> None:
    """The error says what is wrong and what to install."""
    with pytest.raises(BackendProblem) as caught:
        choose_backend(versions, platform=platform)
    assert all(word in str(caught.value) for word in words)


def test_what_a_worker_needs_is_named_where_it_is_missing() -> None:
    """Of the base install all of it; then the backend; nothing where a worker runs, as here."""
    whole = dict.fromkeys(WORKER_EXTRA, "1")
    with pytest.raises(BackendProblem, match=r"jinja2, .* tokenizers are not.*mlxd\[worker,cpu\]"):
        check_worker_installed({}, platform="linux")
    with pytest.raises(BackendProblem, match="without a backend"):
        check_worker_installed(whole, platform="linux")
    with pytest.raises(BackendProblem, match="no backend for win32"):
        check_worker_installed({}, platform="win32")
    check_worker_installed({**whole, "mlx-cpu": "1"}, platform="linux")
    check_own_worker()


def test_this_environment_has_one_backend() -> None:
    """What is installed here is told from the environment's own records."""
    versions = installed_versions()
    installed = choose_backend(versions, platform=sys.platform)
    assert versions[installed.distribution] == versions["mlx"] == installed.version
