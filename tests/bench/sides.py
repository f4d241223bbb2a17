"""The two servers that are compared, as processes, and the generator that puts load on them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from mlxd.v1 import model_pb2, model_pb2_grpc, types_pb2
from mlxd_controller.bench.requests import GRPC, SETTLED, Job, Request, job_to_json
from mlxd_shared.ops.measuring import Outcome, outcomes_from_json
from mlxd_worker.machine.cores import available_cores
from tests.bench.cases import CLIENTS
from tests.bench.load import HTTP, LLAMA
from tests.support.served import serve

LINE_BYTES_MAX = 1 << 26
LISTENING = b"not recommended for production"
"""What mlx-lm's server writes once it listens."""
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Side:
    """A server that listens, with the model loaded or about to be."""

    kind: str
    target: str
    model: str


@asynccontextmanager
async def our_side(
    folder: Path, *, rows_max: int, context: int, python: str = sys.executable
) -> AsyncIterator[Side]:
    """Serve the model in `folder` by a controller and a worker of its own, in float32.

    python: the interpreter, which decides whose they are.
    """
    async with serve("--model", f"bench={folder}", python=python) as server:
        options = types_pb2.LoadOptions(
            weights=types_pb2.WEIGHTS_FORMAT_FLOAT32, rows_max=rows_max, context_length=context
        )
        request = model_pb2.LoadModelRequest(model="bench", options=options)
        async with grpc.aio.insecure_channel(server.address) as channel:
            async for _ in model_pb2_grpc.ModelServiceStub(channel).LoadModel(request):
                pass
        yield Side(GRPC, server.address, "bench")


@asynccontextmanager
async def peer_side(folder: Path, *, blas: str) -> AsyncIterator[Side]:
    """Serve the model in `folder` by mlx-lm; blas: ours or shipped."""
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.peer_server", blas),
        *("--model", str(folder), "--host", _HOST, "--port", str(port), "--log-level", "WARNING"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    seen = [b""]
    while LISTENING not in seen[-1]:
        seen.append(await process.stderr.readline())
        if not seen[-1]:
            raise RuntimeError(b"".join(seen).decode())
    draining = asyncio.create_task(_drain(process.stderr))
    try:
        yield Side(HTTP, f"{_HOST}:{port}", "default_model")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await draining


@asynccontextmanager
async def llama_side(
    folder: Path, file: Path, kind: str, *, rows_max: int, context: int
) -> AsyncIterator[Side]:
    """Serve the model in `folder` by llama.cpp, as `kind` of GGUF in `file`, which is made here."""
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.gguf_file", str(folder), str(file), kind)
    )
    if await made.wait():
        message = "the GGUF file could not be written: the wheel gguf writes it"
        raise RuntimeError(message)
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.llama_server", str(file), str(port), str(context)),
        *(str(rows_max), str(available_cores())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            message = "llama.cpp's server ended: the wheel xllamacpp holds it"
            raise RuntimeError(message)
        yield Side(LLAMA, f"{_HOST}:{port}", "default_model")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def put_load(
    side: Side,
    requests: Sequence[Request],
    *,
    settling: Sequence[Request],
    clients: int = CLIENTS,
    together: asyncio.Barrier | None = None,
) -> list[Outcome]:
    """Put a load on one side from a process of its own; return what its clients saw.

    together: where it waits, once it has settled, for the others of a load to have.
    """
    job = Job(
        kind=side.kind,
        target=side.target,
        model=side.model,
        settling=tuple(settling),
        requests=tuple(requests),
        clients=clients,
        together=together is not None,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job_to_json(job))
        if together is not None:
            settled = await process.stdout.readline()
            if settled.strip() == SETTLED.encode():  # else its end says why
                await together.wait()
                process.stdin.write(b"\n")
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        message = f"the load generator ended with code {process.returncode}"
        raise RuntimeError(message)
    return outcomes_from_json(out)


def _free_port() -> int:
    # The server cannot tell which port it was given, so one is found before it starts.
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


async def _drain(stream: asyncio.StreamReader) -> None:
    """Read what nobody looks at, so that its writer is never held up."""
    while await stream.read(1 << 16):
        pass
