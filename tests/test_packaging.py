"""What a user installs: the wheel, built by the real backend, holds all of it and nothing else."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from tests.tidy import tree

ROOT = Path(__file__).resolve().parents[1]
BUILD_TIMEOUT_S = 120
PACKAGES = {
    "mlxd", "mlxd_controller", "mlxd_gateway", "mlxd_models", "mlxd_shared", "mlxd_worker",
}  # fmt: skip
DEMO_MODEL_NBYTES_MAX = 12 * 10**6


def build(kind: str, folder: Path) -> Path:
    """Build the `wheel` or the `sdist` of this tree into `folder`, offline."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(name="wheel", scope="module")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of this tree, open for reading."""
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(name="about", scope="module")
def read_metadata(wheel: zipfile.ZipFile) -> Message:
    """The wheel's METADATA."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """No tests, tools or examples travel with the product."""
    tops = {name.partition("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    """Nothing that the packages need is left behind by a build setting."""
    tops = ("controller/", "gateway/", "worker/", "shared/")
    wanted = {name.partition("/")[2] for name in tree.names() if name.startswith(tops)}

    assert wanted
    assert wanted <= set(wheel.namelist())


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_package_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    """A type checker of the user sees our annotations."""
    assert f"{package}/py.typed" in wheel.namelist()


def test_the_demo_model_is_inside_and_small(wheel: zipfile.ZipFile) -> None:
    """The embedded model travels with the package, within its promised size."""
    prefix = "mlxd_shared/demo_model/"
    sizes = {
        info.filename.removeprefix(prefix): info.file_size
        for info in wheel.infolist()
        if info.filename.startswith(prefix)
    }

    assert {"config.json", "tokenizer.json"} <= set(sizes)
    assert any(name.endswith(".safetensors") for name in sizes)
    assert sum(sizes.values()) <= DEMO_MODEL_NBYTES_MAX


def test_the_wheel_writes_its_protos(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """`mlxd protos`, run from the wheel's own files, writes what is in proto/."""
    installed, out = tmp_path / "installed", tmp_path / "out"
    wheel.extractall(installed)
    command = [sys.executable, "-m", "mlxd_controller.cli", "protos", "--out", str(out)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert protos_below(out) == protos_below(ROOT / "proto")
    # A wheel without them would have been helped out by the working tree, were it found instead.
    assert protos_below(installed / "mlxd_shared" / "protos") == protos_below(out)


def protos_below(folder: Path) -> dict[str, bytes]:
    """Map the path of each .proto file below `folder` to what it holds."""
    files = folder.rglob("*.proto")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_licence_travels(wheel: zipfile.ZipFile, about: Message) -> None:
    """The wheel names its licence and holds the text."""
    assert about["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_base_asks_for_no_mlx(about: Message) -> None:
    """MLX and tokenizers are asked for by extras alone."""
    needed = about.get_all("Requires-Dist") or []
    base = {line for line in needed if "extra ==" not in line}

    assert base
    assert not [line for line in base if line.startswith(("mlx", "tokenizers"))]
    assert [line for line in needed if line.startswith("mlx<") and "extra == 'worker'" in line]


def test_the_commands_are_installed(wheel: zipfile.ZipFile) -> None:
    """Installing the wheel gives `mlxd` and `mlxd-worker`."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    text = wheel.read(name).decode()

    assert "mlxd = mlxd_controller.cli:main" in text
    assert "mlxd-worker = mlxd_worker.__main__:main" in text


def test_the_source_archive_can_be_tested(tmp_path: Path) -> None:
    """The sdist holds protos, tests and tools, and nothing that a tool left in the tree."""
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    wanted = {"proto/mlxd/v1/types.proto", "tests/test_packaging.py", "Makefile"}
    assert wanted | {"shared/mlxd_shared/protos/mlxd/v1/types.proto"} <= names
    litter = (".venv", ".tools", "node_modules", ".import_linter_cache", "__pycache__")
    assert not [name for name in names if set(name.split("/")) & set(litter)]
