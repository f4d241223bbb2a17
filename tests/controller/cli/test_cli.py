"""What all commands of `mlxd` share: help, addresses, exit codes, how arguments are read."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest
import typer

from mlxd_controller.cli.commands.serving.serve import _limits, _named_folder, _reserve
from mlxd_controller.cli.outcome import model_argument
from mlxd_controller.memory.device import CudaProbe
from mlxd_controller.memory.nvidia import Gpu
from mlxd_shared.config import GIB
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import LIMIT_S, clean_environment, mlxd

_M = TypeVar("_M")


@pytest.mark.asyncio
async def test_help_names_every_command_and_exit_code() -> None:
    """A user without a manual finds the commands, the options of each, and how they end."""
    ran, version = await mlxd("--help"), await mlxd("version")

    for command in (
        "serve", "load", "unload", "ps", "models", "generate", "tokenize", "status", "fit",
        "config",
    ):  # fmt: skip
        assert f"\n  {command} " in ran.out
    assert "130 interrupted" in " ".join(ran.out.split())
    assert "--install-completion" in ran.out
    assert version.out.startswith("mlxd ")


@pytest.mark.asyncio
async def test_no_server_is_its_own_code() -> None:
    """4, and what to do about it."""
    ran = await mlxd("ps", "--address", "127.0.0.1:1")

    assert (ran.code, ran.out) == (4, "")
    assert "no server answers at 127.0.0.1:1; start one with `mlxd serve`" in ran.err


MISUSES = [
    (("ps", "--address", "nonsense"), "address: 'nonsense' is not"),
    (("generate", "m", "x", "--keep-alive", "soon"), "'soon' is not a duration"),
    (("generate", "m", "x", "--logit-bias", "3"), "'3' is not ID=BIAS"),
    (("generate", "m", "x", "--seed", "-1"), "--seed: -1 is outside"),
    (("load", "m", "--weights", "int3"), "'int3' is not one of"),
    (("load",), "Missing argument"),
    (("serve", "--model", "a=/nowhere/at/all"), "/nowhere/at/all is not a folder"),
    (("serve", "--reserve", "100%"), "a share from 0% to 99%"),
    (("serve", "--gpu-overhead", "much"), "--gpu-overhead much: write a size"),
    (("serve", "--memory-limit", "much"), "'much' is not a size"),
    (("serve", "--waiting-max", "65537"), "less than or equal to 65536"),
    (("serve", "--worker", "w=unix:/x", "--waiting-max", "3"), "that mlxd starts"),
    (("serve", "--worker", "w=unix:/x", "--orphan-grace", "3"), "that mlxd starts"),
    (("serve", "--orphan-grace", "-1"), "at most 1h"),
]
EACH = """
import json, os, sys
import mlxd_controller.cli
from mlxd_controller.cli.app import app
from mlxd_controller.cli.commands.models import inventory, load
from mlxd_controller.cli.commands.prompts import generate
from mlxd_controller.cli.commands.serving import serve

for arguments in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, sys.stderr.fileno())
        os.close(reading)
        os.close(writing)
        sys.argv = ["mlxd", *arguments]
        mlxd_controller.cli.main()
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.wait()[1]), said]), flush=True)
"""
"""Runs commands one after another in copies of itself, so that all of `mlxd` is imported once."""


@pytest.fixture(name="outcomes", scope="module")
def run_misuses() -> list[tuple[int, str]]:
    """How each misuse ended: its exit code, and what it said on stderr."""
    commands = json.dumps([arguments for arguments, _ in MISUSES])
    process_wide = {"MLXD_ADDRESS": "127.0.0.1:1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", EACH, commands], env=clean_environment() | process_wide,
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    return [(code, said) for code, said in map(json.loads, done.stdout.splitlines())]


@pytest.mark.parametrize("number", range(len(MISUSES)))
def test_bad_usage_is_its_own_code(outcomes: list[tuple[int, str]], number: int) -> None:
    """2, before anything is sent, with what was wrong."""
    code, said = outcomes[number]

    assert code == 2
    assert MISUSES[number][1] in " ".join(said.split())


@pytest.mark.asyncio
async def test_the_nearest_address_wins() -> None:
    """After the command, before the command, MLXD_ADDRESS: in this order."""
    async with serving(Answers()) as fake:
        after = await mlxd(
            "--address", "127.0.0.1:1", "ps", "--address", fake.address, MLXD_ADDRESS="127.0.0.1:2"
        )
        before = await mlxd("--address", fake.address, "ps", MLXD_ADDRESS="127.0.0.1:2")
        named = await mlxd("ps", MLXD_ADDRESS=fake.address)

    assert [after.code, before.code, named.code] == [0, 0, 0]
    assert len(fake.requests) == 3


def test_a_path_is_told_from_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit paths, and folders that are here, are made absolute; names stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)

    assert model_argument("a/b") == str(tmp_path / "a" / "b")
    assert model_argument("./a") == str(tmp_path / "a")
    assert model_argument(".") == str(tmp_path)
    assert model_argument("/x/y") == "/x/y"
    assert model_argument("~/m") == str(Path.home() / "m")
    assert [model_argument(name) for name in ("a", "org/model", "demo", "")] == [
        "a", "org/model", "demo", "",
    ]  # fmt: skip


def test_serve_reads_names_and_folders(tmp_path: Path) -> None:
    """NAME=PATH, or PATH alone, whose name is the folder's; a name holds no separator."""
    odd = tmp_path / "x=y"
    odd.mkdir()

    assert _named_folder(f"n={tmp_path}") == ("n", tmp_path)
    assert _named_folder(str(odd)) == ("x=y", odd)
    with pytest.raises(typer.Exit):
        _named_folder("n=relative/nowhere")


@pytest.mark.parametrize(
    ("text", "reserve"),
    [(None, (None, 0.10)), ("2G", (2 << 30, 0.10)), ("25%", (None, 0.25)), ("0%", (None, 0.0))],
)
def test_serve_reads_the_reserve(text: str | None, reserve: tuple[Any, ...]) -> None:
    """Bytes, or a share of the memory."""
    assert _reserve(text) == pytest.approx(reserve)


@pytest.mark.parametrize(
    ("text", "overhead_bytes"), [(None, 0), ("0", 0), ("1G", GIB), ("5%", 80 * GIB // 20)]
)
def test_serve_keeps_an_overhead_free_of_each_gpu(text: str | None, overhead_bytes: int) -> None:
    """From the command line to the devices: bytes, or a share of each GPU's memory."""
    gpus = tuple(
        Gpu(index, f"GPU-{index}", "H200", 80 * GIB, free)
        for index, free in enumerate((60 * GIB, 80 * GIB))
    )
    probe = CudaProbe(_limits(None, "1G", text), gpus=gpus)

    first, second = probe.read(())

    assert first.reserve_bytes == second.reserve_bytes == GIB + overhead_bytes
    assert first.budget_bytes == second.budget_bytes == 79 * GIB - overhead_bytes
    assert first.usable_bytes == 59 * GIB - overhead_bytes


INTERRUPTED_IMPORT = """
import os, signal, sys
import mlxd_controller.cli

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
mlxd_controller.cli.main()
"""


@pytest.mark.parametrize(
    "module", ["typer", "grpc", "mlxd_controller.cli.commands.models.inventory"]
)
def test_ctrl_c_while_modules_load_is_no_traceback(module: str) -> None:
    """The command has not begun: it ends as one that was interrupted, and says nothing."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, "ps", module, "--address", "127.0.0.1:1"],
        env=clean_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


SHOW_MODULES = """
import sys
import mlxd_controller.cli
try:
    mlxd_controller.cli.main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
UNNEEDED = {
    "mlxd_controller.cli.commands.serving.serve", "mlxd_controller.core",
    "mlxd_controller.launcher", "mlxd_controller.runtime", "mlxd_controller.store", "mlxd_models",
    "mlxd_shared.serving", "mlxd_shared.wire.interceptors", "psutil", "pygments", "rich.console",
    "structlog", "uvloop",
}  # fmt: skip
"""What takes long to import, and is for servers or for commands that show progress."""


@pytest.mark.asyncio
async def test_a_short_command_imports_nothing_that_takes_long() -> None:
    """Importing is nearly all that it does."""
    async with serving(Answers()) as fake:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SHOW_MODULES, "--address", fake.address, "ps"),
            env=clean_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    imported = set(err.decode().split())

    assert process.returncode == 0, err.decode()
    assert out
    assert "mlxd_controller.cli.app" in imported
    assert imported & UNNEEDED == set()


@pytest.mark.asyncio
async def test_forked_children_never_run_grpc() -> None:
    """gRPC's fork handlers, which can crash a worker before it is one, are off before it loads."""
    program = (
        "import os, sys, mlxd_controller.cli as cli\n"
        "early = 'grpc' in sys.modules\n"
        "sys.argv = ['mlxd', 'version']\n"
        "try:\n    cli.main()\n"
        "except SystemExit:\n    print(early, os.environ['GRPC_ENABLE_FORK_SUPPORT'])\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert out.decode().splitlines()[-1] == "False 0"
