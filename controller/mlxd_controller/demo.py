"""`python -m mlxd_controller.demo`: the whole product in a few seconds.

Starts a real server process, streams a completion of the built-in model to the terminal, prints
what it cost, and stops everything. Nothing outlives it; a failure prints one line and the tail of
the server's log to stderr, and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mlxd import Client, Delta, Finished, MlxdError, SamplingOptions, Status
from mlxd_controller.cli.commands.serving.serve import LISTENING
from mlxd_shared.domain.units import format_bytes

PROMPT = "Once upon a time"
TOKENS = 120
SAMPLING = SamplingOptions(temperature=0.75, seed=11)
START_LIMIT_S = 30.0
STREAM_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
LOG_TAIL_LINES = 15


class NotServed(RuntimeError):
    """A server that did not start, or ended with an error."""


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mlxd_controller.demo")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--model", type=Path, help="a model folder, instead of the built-in model")
    parser.add_argument("--max-tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    # The path of a socket must be short: pytest's and macOS's temporary folders are too deep.
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        try:
            asyncio.run(_demo(Path(folder), log, options.model, options.prompt, options.max_tokens))
        except (MlxdError, TimeoutError, RuntimeError) as error:
            tail = log.read_text(errors="replace").splitlines() if log.exists() else []
            lines = (f"  {line}\n" for line in tail[-LOG_TAIL_LINES:])
            sys.stderr.write("".join([f"demo: {error or type(error).__name__}\n", *lines]))
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


async def _demo(folder: Path, log: Path, model: Path | None, prompt: str, max_tokens: int) -> None:
    named = () if model is None else ("--model", str(model))
    async with serving(f"unix:{folder}/s", log, named) as address, Client(address) as client:
        finished = await _stream(client, prompt, max_tokens)
        status = await client.status()
    sys.stdout.write(f"\n\n{summary(finished, status)}\n")


@asynccontextmanager
async def serving(address: str, log: Path, options: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run `mlxd serve` around the body; yields its address.

    Raises:
        NotServed: it does not start, or ends with an error.
    """
    command = [sys.executable, "-m", "mlxd_controller.cli", "serve", "--address", address, *options]
    with log.open("wb") as stderr:
        server = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=stderr, start_new_session=True, env={**os.environ, "MLXD_CONFIG": "none"},
        )  # fmt: skip
    try:
        assert server.stdout is not None
        line = (await asyncio.wait_for(server.stdout.readline(), START_LIMIT_S)).decode().strip()
        if not line.startswith(LISTENING):
            raise NotServed("the server did not start")
        yield line.removeprefix(LISTENING)
    finally:
        await _stop(server)


async def _stop(server: asyncio.subprocess.Process) -> None:
    if server.returncode is None:
        server.terminate()
    try:
        await asyncio.wait_for(server.wait(), STOP_LIMIT_S)
    except TimeoutError:
        server.kill()
        await server.wait()
        raise
    if server.returncode != 0:
        raise NotServed(f"the server ended with {server.returncode}")


async def _stream(client: Client, prompt: str, max_tokens: int) -> Finished:
    sys.stdout.write(prompt)
    finished: Finished | None = None
    stream = client.generate(
        prompt, sampling=SAMPLING, max_tokens=max_tokens, timeout_s=STREAM_LIMIT_S
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
            else:
                finished = event
    assert finished is not None  # the stream would have raised
    if not finished.usage.completion_tokens:
        raise RuntimeError("the model said nothing")
    return finished


def summary(finished: Finished, status: Status) -> str:
    """Return one line: speed, time to first token, memory, and the maths library."""
    usage = finished.usage
    (worker,) = status.workers
    library = worker.math_library
    speed = f"{usage.tokens_per_s:.0f} tokens/s" if usage.tokens_per_s is not None else "one token"
    return (
        f"[{usage.completion_tokens} tokens, {speed},"
        f" first token {(usage.queue_s + usage.prompt_s) * 1000:.0f} ms"
        f" after {usage.load_s:.1f} s of loading;"
        f" {format_bytes(worker.memory.total_nbytes)} held by the model,"
        f" {format_bytes(worker.memory.resident_nbytes)} by its process;"
        f" {library.name} {library.version} with {library.threads} threads]"
    )


if __name__ == "__main__":
    sys.exit(main())
