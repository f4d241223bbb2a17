"""The Go example: built from the .proto files by Debian's toolchain, streaming over a real socket.

Go and its plugins come from `make tools`. Where they are missing these tests skip; CI has them,
and allows no skip.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxd import Client, SamplingOptions
from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import ModelNotFound
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "go"
TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
BUILD_TIMEOUT_S = 500
RUN_TIMEOUT_S = 90
INTERRUPTED = 130
pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 2 * RUN_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the client said, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture(name="program", scope="module")
def build_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, built as its README says."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine; `make tools` installs them")
    program = tmp_path_factory.mktemp("go") / "stream"
    done = subprocess.run(
        [str(EXAMPLE / "build"), str(program)],
        capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return program


async def start(program: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start the client."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(str(program), *arguments, stdout=pipe, stderr=pipe)


async def end(process: asyncio.subprocess.Process) -> Ran:
    """Wait for the client's end."""
    async with asyncio.timeout(RUN_TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def run_against(program: Path, answers: Answers) -> Ran:
    """Run the client against a server that gives these answers."""
    async with serving(answers) as server:
        return await end(await start(program, server.address, "demo", "Once"))


def test_the_source_is_formatted(program: Path) -> None:
    """gofmt would change nothing."""
    done = subprocess.run(
        ["gofmt", "-l", str(EXAMPLE / "main.go")],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )

    assert program.is_file()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.asyncio
async def test_it_prints_a_stream(program: Path) -> None:
    """The text goes to stdout; the finish and the usage, 64-bit seed and all, to stderr."""
    ran = await run_against(program, Answers(generate=replies.story()))

    assert (ran.code, ran.out) == (0, "Once upon ä\n\n"), ran.err
    summary = json.loads(ran.err)
    assert summary["finish"] == "FINISH_REASON_LENGTH"
    assert summary["usage"]["completion_tokens"] == 4
    assert summary["usage"]["seed"] == str((1 << 64) - 1)


@pytest.mark.asyncio
async def test_it_sends_what_it_was_told(program: Path) -> None:
    """The request carries the arguments, and `optional` values as present."""
    async with serving(Answers(generate=replies.story())) as server:
        await end(await start(program, server.address, "tiny", "Es war einmal"))
        (request,) = server.requests

    assert isinstance(request, inference_pb2.GenerateRequest)
    assert (request.model, request.text, request.max_tokens) == ("tiny", "Es war einmal", 48)
    assert request.sampling.HasField("temperature")
    assert request.sampling.seed == 42


@pytest.mark.asyncio
async def test_a_stream_without_a_finish_has_failed(program: Path) -> None:
    """A stream that just ends is an error, however much text came."""
    ran = await run_against(program, Answers(generate=[replies.delta(0, "Once", 1)]))

    assert ran.code == 1
    assert "ended after 1 tokens without a finish" in ran.err


@pytest.mark.asyncio
async def test_a_gap_has_failed(program: Path) -> None:
    """A message whose offset is not the next token's is an error."""
    script = [replies.delta(0, "Once", 1), replies.last(2, text=" time", token_ids=(4,))]
    ran = await run_against(program, Answers(generate=script))

    assert ran.code == 1
    assert "token 1 was due, 2 came" in ran.err


@pytest.mark.asyncio
async def test_an_error_keeps_its_code_and_words(program: Path) -> None:
    """The server's refusal reaches the user."""
    ran = await run_against(program, Answers(generate=[ModelNotFound("demo")]))

    assert ran.code == 1
    assert ran.err.startswith("NotFound: ")
    assert "demo" in ran.err


@pytest.mark.asyncio
async def test_an_interrupt_ends_the_stream_on_the_server(program: Path) -> None:
    """Ctrl-C cancels the call, and the server sees it."""
    async with serving(Answers(generate=[replies.delta(0, "Once", 1)], hold=True)) as server:
        process = await start(program, server.address)
        async with asyncio.timeout(RUN_TIMEOUT_S):
            await server.held.wait()
            process.send_signal(signal.SIGINT)
            await server.left.wait()
        ran = await end(process)

    assert ran.code == INTERRUPTED, ran.err
    assert ran.err == ""


@pytest.mark.asyncio
async def test_it_streams_from_the_real_server(program: Path, tmp_path: Path) -> None:
    """Through a real controller and a real worker it prints what the Python client gets."""
    folder = write_tiny_model(tmp_path / "tiny")
    async with serve("--model", f"tiny={folder}") as server, Client(server.address) as client:
        wanted = await client.complete(
            "Once", model="tiny", sampling=SamplingOptions(temperature=0.7, seed=42), max_tokens=48
        )
        ran = await end(await start(program, server.address, "tiny", "Once"))

    assert (ran.code, ran.out) == (0, wanted.text + "\n"), ran.err
    summary = json.loads(ran.err)
    assert summary["usage"]["completion_tokens"] == wanted.finished.usage.completion_tokens
    assert summary["usage"]["seed"] == "42"
