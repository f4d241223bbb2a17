"""The base install is enough for the controller and the client: proved by refusing the rest.

A child interpreter refuses every import that is neither the standard library, nor ours, nor
brought by a base dependency. That is what a machine without MLX looks like, at the price of one
process instead of a fresh environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

import pytest
from packaging.requirements import Requirement

CHILD_TIMEOUT_S = 60
OURS = {"mlxd", "mlxd_controller", "mlxd_models", "mlxd_shared"}
GATEWAY = {"mlxd_gateway"}
ROUTER = "mlxd_controller.router"
"""The door for a router, whose modules need an extra."""
RAY = "mlxd_controller.fleet.ray_nodes"
"""What reaches nodes over Ray, an extra."""
IN_RAY = ("colorama", "psutil")
"""Others' packages that Ray brings inside its own."""
PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

allowed, beside = set(sys.argv[2].split(",")), tuple(sys.argv[3].split(","))

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed or top in sys.stdlib_module_names:
            return None
        raise ModuleNotFoundError(f"not in the base install: {name}", name=name)

sys.meta_path.insert(0, Refuse())
for root in sys.argv[1].split(","):
    package = importlib.import_module(root)
    for found in pkgutil.walk_packages(package.__path__, root + "."):
        if not found.name.endswith("__main__") and not found.name.startswith(beside):
            importlib.import_module(found.name)
            print(found.name)
"""


def normal(name: str) -> str:
    """Spell a distribution's name the one way that comparisons want."""
    return re.sub(r"[-_.]+", "-", name).lower()


def base_distributions(*extras: str) -> set[str]:
    """The dependencies of mlxd and all that they need, with these extras, on this platform."""
    names: set[str] = set()
    waiting: list[tuple[str, frozenset[str]]] = [("mlxd", frozenset(extras) | {""})]
    while waiting:
        name, its_extras = waiting.pop()
        names.add(normal(name))
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            markers = [{"extra": extra} for extra in its_extras or {""}]
            wanted = needed.marker is None or any(map(needed.marker.evaluate, markers))
            if wanted and normal(needed.name) not in names:
                waiting.append((needed.name, frozenset(needed.extras)))
    return names


def allowed_modules(*extras: str) -> set[str]:
    """Top-level modules that an install brings, ours but the worker included."""
    base = base_distributions(*extras)
    brought = metadata.packages_distributions().items()
    return OURS | GATEWAY | {module for module, dists in brought if base & set(map(normal, dists))}


def import_all(
    packages: set[str],
    *extras: str,
    beside: Sequence[str] = (f"{ROUTER}.", RAY),
    bundled: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Import every module of the packages in a child that refuses the rest of the world.

    beside: what the names of modules begin with that are left out. bundled: what a dependency has
    in its own folder, under another's name.
    """
    allowed = ",".join(allowed_modules(*extras) | set(bundled))
    command = [sys.executable, "-c", PROGRAM, ",".join(packages), allowed, ",".join(beside)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )


def test_the_controller_and_the_client_need_no_extra() -> None:
    """Every module of controller, client and shared imports with the base install alone."""
    done = import_all(OURS)

    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"mlxd.client", "mlxd_controller.cli", "mlxd_shared.domain.errors"} <= imported


def test_the_gateway_needs_the_extra_http_and_no_more() -> None:
    """Every module of the gateway imports with that extra, and not without it."""
    assert import_all(GATEWAY, "http").returncode == 0
    done = import_all(GATEWAY)
    assert done.returncode != 0
    assert "not in the base install" in done.stderr


def test_the_router_s_door_needs_the_extra_router_and_no_more() -> None:
    """Every module of it imports with that extra, and not without it."""
    done = import_all({ROUTER}, "router", beside=("-",))
    assert done.returncode == 0, done.stderr
    assert f"{ROUTER}.engine" in done.stdout.split()
    done = import_all({ROUTER}, beside=("-",))
    assert done.returncode != 0
    assert "not in the base install: smg_grpc_proto" in done.stderr


def test_a_fleet_s_nodes_need_the_extra_fleet_and_no_more() -> None:
    """The file that knows Ray imports with that extra, and not without it; the rest of it does."""
    fleet = RAY.rpartition(".")[0]
    done = import_all({fleet}, "fleet", beside=("-",), bundled=IN_RAY)
    assert done.returncode == 0, done.stderr
    assert RAY in done.stdout.split()
    assert import_all({fleet}).returncode == 0
    done = import_all({fleet}, beside=("-",), bundled=IN_RAY)
    assert done.returncode != 0
    assert "not in the base install: ray" in done.stderr


@pytest.mark.parametrize("module", ["mlx", "tokenizers", "mlxd_worker", "mlx_lm", "numpy"])
def test_the_child_really_refuses(module: str) -> None:
    """What the base install does not bring cannot be imported in that child."""
    done = import_all({module})

    assert done.returncode != 0
    assert f"not in the base install: {module}" in done.stderr


def test_the_base_dependencies_hold_no_backend() -> None:
    """MLX and the tokenisers come with the worker extra, never with the base."""
    base = base_distributions()

    assert {"grpcio", "protobuf", "structlog", "typer"} <= base
    assert base.isdisjoint({"mlx", "mlx-cpu", "mlx-cuda-13", "tokenizers", "numpy", "mlx-lm"})
