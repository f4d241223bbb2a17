"""The README's commands, run by a shell in their order and as they are printed.

What differs is what a test must not share: the ports, and the hub, which is on loopback and has a
tiny model under the name that is printed. An agent is a stand-in, and the bench is a short one.
Set-up, `make demo` and `make test` are what `.ci/run` does before and around this test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chat_template import write_template
from tests.support.cli import clean_environment
from tests.support.effort import IN_SOAK
from tests.support.hub_server import FakeHub, Repository, serving
from tests.support.made_stores import commit_of
from tests.support.ports import own_port
from tests.support.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
GRPC, HTTP = "127.0.0.1:8555", "127.0.0.1:8556"
ELSEWHERE = ("python3 -m venv", "pip install", "make ")
"""What has been run where this test runs."""
AGENT = 'printf "%s" "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL" > "{written}"'
"""What stands in for an agent: it writes down where it was sent."""
COMMAND_S = 600.0
"""The proof of the engine takes two minutes of two cores, and other tests are beside it."""
PROGRAMS = 2
"""By the SDK of OpenAI, and by mlxd's own client."""
PULLED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def readme() -> str:
    """The README's text."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def console_commands(text: str) -> list[str]:
    """The commands behind `$` in blocks of a console, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = (line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    return [re.sub(r"\s{2,}#.*", "", command).strip() for command in commands]


def python_blocks(text: str) -> list[str]:
    """The programs."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def more_of(command: str, http: str) -> str:
    """What a test says besides: a message, where a reader would chat, and bounds."""
    if command.startswith("mlxd launch"):
        return f" --url http://{http}"
    if command.startswith("mlxd bench"):
        return " --prompt 16 --tokens 8 --runs 1"
    if command.startswith("mlxd doctor"):
        # Whole in the soak: it takes minutes, and what it proves has tests of its own. Other tests'
        # load can make a path look slow: see `faults_of`.
        return " || true" if IN_SOAK else " --quick || true"
    if not command.startswith("mlxd run"):
        return ""
    return " --max-tokens 5" if command.endswith('"') else " 'Once' --max-tokens 5"


def faults_of(doctor: str) -> list[str]:
    """What the doctor finds wrong, but for the speeds of paths, which other tests take from it."""
    faults = [line for line in doctor.splitlines() if re.search(r"\s{2,}fault\s", line)]
    return [line for line in faults if not line.startswith("speed of ")]


@contextmanager
def hub_with(name: str, folder: Path) -> Iterator[FakeHub]:
    """A hub that has this folder under a name."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(FakeHub({name: Repository(commit_of("1"), files)})) as hub:
        yield hub


def write_agent(path: Path, written: Path) -> None:
    """Write a program that stands in for an agent."""
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{AGENT.format(written=written)}\n")
    path.chmod(0o755)


async def run_shell(script: str, environment: dict[str, str]) -> str:
    """Run a script as a reader's shell would; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script), env=environment, cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), COMMAND_S)
    assert process.returncode == 0, f"{script}\n{out.decode()}"
    return out.decode()


@pytest.mark.timeout(2 * COMMAND_S)
@pytest.mark.asyncio
async def test_the_readme_runs_as_a_script(tmp_path: Path) -> None:
    """Every command does what stands beside it, and so do the programs."""
    commands = console_commands(readme())
    assert [line for line in commands if line.startswith(ELSEWHERE)] != commands
    tiny = write_template(write_tiny_model(tmp_path / "tiny"))
    written = tmp_path / "written"
    write_agent(tmp_path / "bin" / "claude", written)
    with hub_with(PULLED, tiny) as hub, own_port() as grpc, own_port() as http:
        environment = clean_environment() | {
            "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.endpoint,
            "MLXD_HUB_CACHE": str(tmp_path / "hub"),
            "MLXD_ADDRESS": grpc,
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }

        def here(text: str) -> str:
            return text.replace(GRPC, grpc).replace(HTTP, http).replace(
                "--http ", f"--http {http} "
            )  # fmt: skip

        said: dict[str, str] = {}
        try:
            for command in commands:
                if command.startswith(ELSEWHERE):
                    continue
                line = here(command).replace("MODEL", "demo") + more_of(command, http)
                said[command] = await run_shell(line, environment)
            stories = []
            for program in python_blocks(readme()):
                (tmp_path / "call.py").write_text(here(program))
                stories.append(await run_shell(f"{sys.executable} {tmp_path}/call.py", environment))
        finally:
            pid = "mlxd status --json | python -c 'import json,sys; print(json.load(sys.stdin)"
            await run_shell(f"""kill "$({pid}["pid"])')" """, environment)

    assert written.read_text() == f"http://{http} demo"
    assert "fast path" in said["mlxd doctor"]
    assert faults_of(said["mlxd doctor"]) == []
    served = next(out for line, out in said.items() if line.startswith("mlxd serve"))
    assert f"mlxd listens on {grpc}" in served
    assert f"http://{http}" in served
    assert len(stories) == PROGRAMS
    assert all(len(story.split()) > 20 for story in stories), stories
    listed = said["mlxd ps"]
    assert "demo" in listed
    assert PULLED in listed
    curl = next(out for line, out in said.items() if line.startswith("curl"))
    assert json.loads(curl[curl.index("{") :])["choices"][0]["text"]
