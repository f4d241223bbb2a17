"""The images and the compose file, as far as they can be proved without a container engine: linted,
their commands taken by the real command lines, what they install installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.tooling import dockerfile
from tests.tooling.command_line import parse_command, port_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
IGNORE = ROOT / "docker" / "Dockerfile.dockerignore"
BIN = Path(sys.executable).parent
IMAGES = {"full": "build-full", "controller": "build-controller"}
LINT_TIMEOUT_S = 60
INSTALL_TIMEOUT_S = 300
BUILD_TIMEOUT_S = 2 * INSTALL_TIMEOUT_S
GLIBC_OF_BOOKWORM = (2, 36)
GLIBC_MIN = (2, 35)


def lint(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a linter of the development environment."""
    return subprocess.run(
        [str(BIN / program), *arguments],
        capture_output=True, text=True, timeout=LINT_TIMEOUT_S, check=False,
    )  # fmt: skip


def stages() -> dict[str, dockerfile.Stage]:
    """The stages of the Dockerfile."""
    return dockerfile.parse(DOCKERFILE.read_text(encoding="utf-8"))


def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file."""
    compose_services = YAML(typ="safe").load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert isinstance(compose_services, dict)
    return compose_services


def test_hadolint_finds_nothing() -> None:
    """The Dockerfile keeps hadolint's rules, and the shell lines in it ShellCheck's."""
    done = lint("hadolint", str(DOCKERFILE))

    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_sees_a_breach(tmp_path: Path) -> None:
    """The linter is on: an image without a version is refused."""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp && echo $x\n", encoding="utf-8")
    done = lint("hadolint", str(bad))

    assert done.returncode != 0
    assert "DL3007" in done.stdout


def test_the_compose_file_is_one() -> None:
    """Compose would accept the file: it keeps the published schema."""
    done = lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_has_a_new_enough_c_library() -> None:
    """MLX's wheels ask for glibc 2.35; both images begin from Debian 12."""
    assert stages()["base"].parent.endswith("-slim-bookworm")
    assert GLIBC_OF_BOOKWORM >= GLIBC_MIN


@pytest.mark.parametrize("image", IMAGES)
def test_nobody_is_root(image: str) -> None:
    """A container runs as a user of its own, by number, so that Kubernetes can check it."""
    users = [user for stage in dockerfile.chain(stages(), image) for user in stage.all("USER")]

    assert users == ["10001:10001"]


def test_a_build_sees_every_package() -> None:
    """Each folder that the wheel takes a package from is let into a build, and the wheel's hook.

    Machine code that was made here stays here: an image may be of another kind.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    let_in = IGNORE.read_text(encoding="utf-8").split()

    assert packages
    assert {f"!{package.partition('/')[0]}" for package in packages} <= set(let_in)
    assert "custom" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert "!hatch_build.py" in let_in
    assert let_in.index("**/*.so") > let_in.index("!worker")


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("extra", ["http", "router"])
def test_every_image_can_serve_others(image: str, extra: str) -> None:
    """`--http` and `--router` after an image's name are served: the extras are in both."""
    lines = "\n".join(stages()[IMAGES[image]].all("RUN"))

    assert re.search(rf"\[(.*,)?{extra}\b.*\]", lines)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_takes_only_what_it_needs(image: str) -> None:
    """Sources and build tools stay behind; the controller's image never sees MLX."""
    assert dockerfile.sources(stages(), image) == {IMAGES[image]}
    lines = "\n".join(stages()[IMAGES["controller"]].all("RUN"))
    assert "[worker" not in lines


def test_the_image_serves_and_asks_itself() -> None:
    """The command and the health check are real ones, of one port, which is exposed."""
    runtime = stages()["runtime"]
    serve = parse_command(dockerfile.exec_form(runtime.all("CMD")[0]))
    health = parse_command(dockerfile.exec_form(runtime.all("HEALTHCHECK")[0]))

    assert serve["allow_remote"] is True
    assert [port_of(serve["address"]), port_of(health["address"])] == runtime.all("EXPOSE") * 2


@pytest.mark.parametrize("service", ["worker", "controller"])
def test_compose_runs_a_stage_that_exists(service: str) -> None:
    """A service is built from this Dockerfile, by the name of a stage, or its last one."""
    build = services()[service]["build"]
    folder = (COMPOSE.parent / build["context"]).resolve()

    assert folder == ROOT
    assert (folder / build["dockerfile"]).resolve() == DOCKERFILE
    assert build.get("target", "full") in stages()


def test_compose_tells_the_worker_where_to_listen() -> None:
    """The worker's command is one that it takes, and its health check asks at its port."""
    worker = services()["worker"]
    options = parse_command(worker["command"])
    health = parse_command(worker["healthcheck"]["test"][1:])

    assert options["allow_remote"] is True
    assert port_of(health["address"]) == port_of(options["listen"])


def test_compose_tells_the_controller_where_the_worker_is() -> None:
    """The controller's command is one that it takes, and it names the worker's host and port."""
    controller, worker = services()["controller"], services()["worker"]
    options = parse_command(controller["command"])
    (attached,) = options["worker"]
    host, _, port = attached.partition("=")[2].partition(":")

    assert host == "worker"
    assert port == port_of(parse_command(worker["command"])["listen"])
    assert set(worker["networks"]) < set(controller["networks"])


def test_only_the_controller_is_published_and_only_here() -> None:
    """No other machine reaches a container unless the operator says so."""
    controller, worker = services()["controller"], services()["worker"]
    port = port_of(parse_command(controller["command"])["address"])

    assert "ports" not in worker
    assert controller["ports"] == [f"127.0.0.1:{port}:{port}"]


def context(folder: Path) -> None:
    """Copy what the ignore file lets into a build."""
    for line in IGNORE.read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            source = ROOT / line[1:]
            if source.is_dir():
                litter = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, folder / source.name, symlinks=True, ignore=litter)
            else:
                shutil.copy(source, folder)


def build(stage: str, root: Path) -> Path:
    """Do in `root` what the RUN lines of a stage do in an image; answer where it installed."""
    work = root / "src"
    work.mkdir()
    context(work)
    arguments = dict(
        line.split("=", 1)
        for one in dockerfile.chain(stages(), stage)
        for line in one.all("ARG")
        if "=" in line
    )
    environment = os.environ | arguments | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    for one in dockerfile.chain(stages(), stage):
        for line in one.all("RUN"):
            here = line.replace("/wheels", f"{root}/wheels").replace("/opt/", f"{root}/opt/")
            done = subprocess.run(
                ["/bin/sh", "-eu", "-c", here], cwd=work, env=environment,
                capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{here}\n{done.stdout}{done.stderr}"
    return root / "opt" / "mlxd"


def ask(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that an image would hold, away from this tree."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=folder, env=clean,
        capture_output=True, text=True, timeout=LINT_TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_controller_s_image_works_without_mlx(tmp_path: Path) -> None:
    """What its RUN lines install runs every command, has no MLX, and says so as a worker."""
    installed = build(IMAGES["controller"], tmp_path)
    python, mlxd = str(installed / "bin" / "python"), str(installed / "bin" / "mlxd")

    assert ask(mlxd, "serve", "--help", folder=tmp_path).returncode == 0
    assert ask(mlxd, "protos", "--out", str(tmp_path / "p"), folder=tmp_path).returncode == 0
    assert ask(python, "-c", "import mlxd_controller.app", folder=tmp_path).returncode == 0
    assert ask(python, "-c", "import mlxd_gateway.app", folder=tmp_path).returncode == 0
    assert "No module" in ask(python, "-c", "import mlx", folder=tmp_path).stderr
    refused = ask(python, "-m", "mlxd_worker", folder=tmp_path)
    assert refused.returncode != 0
    assert "mlx" in refused.stderr


@pytest.mark.soak
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_whole_image_has_a_working_mlx(tmp_path: Path) -> None:
    """What its RUN lines install computes: a worker of it gets as far as its options."""
    installed = build(IMAGES["full"], tmp_path)
    python = str(installed / "bin" / "python")
    program = (
        "from mlxd_worker.machine.backend import prepare_backend\n"
        "print(prepare_backend().distribution)\n"
        "import mlx.core as mx\n"
        "print((mx.ones((2, 2)) @ mx.ones((2, 2))).tolist())"
    )
    done = ask(python, "-c", program, folder=tmp_path)

    assert done.stdout.splitlines() == ["mlx-cpu", "[[2.0, 2.0], [2.0, 2.0]]"], done.stderr
