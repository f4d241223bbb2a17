"""The gateway as a process: it ends with its controller, comes back, is protected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from pathlib import Path

import httpx2
import psutil
import pytest

from mlxd import Client
from mlxd_shared.ops.known_process import KnownProcess, mark_of
from tests.support.certificates import SECRET, Authority, token_file
from tests.support.cli import LIMIT_S, mlxd, start
from tests.support.gateways import Web, serve_web
from tests.support.tiny_model import write_tiny_model

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
TOKENS = 160


def gateway_of(web: Web) -> psutil.Process:
    """Return the gateway's process."""
    assert web.served is not None
    children = psutil.Process(web.served.process.pid).children()
    (gateway,) = (child for child in children if "mlxd_gateway" in child.cmdline())
    return gateway


async def end_of(pid: int) -> None:
    """Wait until a process has ended."""
    ended = asyncio.Event()
    mark = mark_of(pid)
    if mark is None:
        return
    try:
        known = KnownProcess(mark)
    except ProcessLookupError:
        return
    known.watch(ended.set)
    await asyncio.wait_for(ended.wait(), LIMIT_S)


async def read_text(web: Web, prompt: str, begun: asyncio.Event | None = None) -> str:
    """Return the text of a whole stream of events; `begun` is set in its middle."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.8, "seed": 7,
        "stream": True,
    }  # fmt: skip
    text, pieces = "", 0
    async with web.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx2.Response(200, content=line.removeprefix("data: ")).json()
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                pieces += 1
                if begun is not None and pieces == 5:
                    begun.set()
        assert line in {"", "data: [DONE]"}
    return text


@pytest.mark.asyncio
async def test_no_client_sees_a_worker_die() -> None:
    """Streams of events have the text that they have if nobody kills their worker."""
    prompts = [f"Once upon a time there was a {word}" for word in ("king", "cat", "boat")] * 2
    async with serve_web("--model", f"demo={DEMO}") as web:
        assert web.served is not None
        whole = await asyncio.gather(*(read_text(web, prompt) for prompt in prompts))
        begun = asyncio.Event()
        readers = [asyncio.create_task(read_text(web, prompt, begun)) for prompt in prompts]
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        async with Client(web.served.address) as client:
            (worker,) = (await client.status()).workers
        os.kill(worker.pid, signal.SIGKILL)
        assert await asyncio.gather(*readers) == whole
        async with Client(web.served.address) as client:
            pids = {worker.pid for worker in (await client.status()).workers}
        assert pids != {worker.pid}


@pytest.mark.asyncio
async def test_a_gateway_ends_with_its_controller() -> None:
    """Killed, not only stopped: nobody listens afterwards."""
    async with serve_web("--model", f"demo={DEMO}") as web:
        assert web.served is not None
        gateway = gateway_of(web)
        web.served.process.kill()
        await web.served.process.wait()
        await end_of(gateway.pid)
        with pytest.raises(httpx2.ConnectError):
            await web.http.get("/health")


@pytest.mark.asyncio
async def test_a_gateway_that_dies_comes_back_at_its_address() -> None:
    """The controller serves on, and starts another one."""
    async with serve_web("--model", f"demo={DEMO}") as web:
        first = gateway_of(web)
        first.kill()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    answer = await web.http.get("/health")
                    break
                except httpx2.TransportError:
                    await asyncio.sleep(0)
        assert answer.status_code == 200
        assert gateway_of(web).pid != first.pid
        assert web.served is not None
        assert web.served.count("the gateway has ended; restarting it") == 1


@pytest.mark.asyncio
async def test_a_protected_gateway(tmp_path: Path) -> None:
    """TLS and the token hold on both ways: for its clients, and for it as a client."""
    authority = Authority(tmp_path)
    pair, token = authority.issue(), token_file(tmp_path)
    files = ("--tls-cert", f"{pair.cert}", "--tls-key", f"{pair.key}", "--token-file", f"{token}")
    model = ("--model", f"tiny={write_tiny_model(tmp_path / 'tiny')}")
    async with serve_web(*files, *model, "--http", "localhost:0") as web:
        assert web.url.startswith("https://localhost:")
        trust = ssl.create_default_context(cafile=str(authority.path))
        async with httpx2.AsyncClient(base_url=web.url, verify=trust) as client:
            refused = await client.get("/v1/models")
            headers = {"Authorization": f"Bearer {SECRET}"}
            listed = await client.get("/v1/models", headers=headers)
            body = {"model": "tiny", "prompt": "ab", "max_tokens": 3}
            done = await client.post("/v1/completions", json=body, headers=headers, timeout=LIMIT_S)
        assert (refused.status_code, listed.status_code, done.status_code) == (401, 200, 200)
        assert SECRET not in " ".join(gateway_of(web).cmdline())


@pytest.mark.asyncio
async def test_a_gateway_of_its_own() -> None:
    """`mlxd gateway` serves over a controller elsewhere, and stops at SIGTERM with 0."""
    async with serve_web("--model", f"demo={DEMO}") as web:
        assert web.served is not None
        process = await start("--address", web.served.address, "gateway", "--listen", "127.0.0.1:0")
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode()
        url = line.strip().rpartition(" ")[2]
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            assert (await client.get("/api/tags")).json()["models"][0]["name"] == "demo"
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 0


@pytest.mark.asyncio
async def test_what_cannot_be_served_stops_the_start(tmp_path: Path) -> None:
    """A taken port, an address that others can reach, and origins without --http."""
    model = ("--model", f"{write_tiny_model(tmp_path / 'tiny')}", "--address", "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            f"cannot listen on 127.0.0.1:{port}": ("--http", f"127.0.0.1:{port}"),
            "0.0.0.0:0 is not loopback": ("--http", "0.0.0.0:0"),
            "--http-origin needs --http": ("--http-origin", "https://chat.example"),
            "--image-urls needs --http": ("--image-urls", "public"),
            "image_urls: 'https://a.example'": (
                "--http",
                "127.0.0.1:0",
                "--image-urls",
                "https://a.example",
            ),
        }
        for problem, options in cases.items():
            done = await mlxd("serve", *model, *options)
            assert (done.code, problem in done.err) == (2, True), done.err
