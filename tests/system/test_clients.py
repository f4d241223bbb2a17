"""The real server as `mlxd serve` starts it, and its clients: Python, Node, the command line.

What the fakes promise about a server (tests/fakes/mlxd_server.py) is true of the real one here.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from mlxd import (
    Client,
    Completion,
    Delta,
    Finished,
    FinishReason,
    LoadSpec,
    SamplingOptions,
    Weights,
)
from mlxd_controller.cli.commands.serving.serve import LISTENING
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from mlxd_shared.domain.figures import ModelState
from tests.support.cli import COMMAND, LIMIT_S, clean_environment, mlxd
from tests.support.tiny_model import write_tiny_model
from tests.tidy.tree import ROOT

NODE = ROOT / "examples" / "node"
PYTHON = ROOT / "examples" / "python"
PROMPT = "Once upon a time"
GREEDY = SamplingOptions(temperature=0.0)
# What both examples ask for, so that all three clients must print the same text.
EXAMPLE = SamplingOptions(temperature=0.7, seed=42)
EXAMPLE_TOKENS = 48
NPM_LIMIT_S = 300
SERVICES = ("mlxd.v1.InferenceService", "mlxd.v1.ModelService", "mlxd.v1.StatusService")


@pytest.fixture(name="address", scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`mlxd serve` with nothing configured, on a port of its own; it stops well in the end."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--address", "127.0.0.1:0", "--log-format", "json"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean_environment(),
        )  # fmt: skip
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith(LISTENING), log.read_text(encoding="utf-8")
        yield line.removeprefix(LISTENING)
        process.terminate()
    assert process.returncode == 0, log.read_text(encoding="utf-8")


async def expected_output(client: Client) -> Completion:
    """What the examples print."""
    return await client.complete(PROMPT, model="demo", sampling=EXAMPLE, max_tokens=EXAMPLE_TOKENS)


@pytest.mark.asyncio
async def test_a_user_reads_text_as_it_comes(address: str) -> None:
    """The built-in model streams through controller and worker: gapless, ended, accounted for."""
    async with Client(address) as client:
        await client.unload("demo", force=True)
        events: list[Delta | Finished] = []
        async with client.generate(PROMPT, model="demo", sampling=GREEDY, max_tokens=32) as stream:
            async for event in stream:
                events.append(event)  # noqa: PERF401 - one by one, as a user
        whole = await client.complete(PROMPT, model="demo", sampling=GREEDY, max_tokens=32)
        ids = await client.tokenize(PROMPT, model="demo")
        status = await client.status()

        assert await client.detokenize(whole.token_ids, model="demo") == whole.text
    *deltas, finished = events
    assert isinstance(finished, Finished)
    assert len(deltas) > 1
    assert "".join(event.text for event in deltas if isinstance(event, Delta)) == whole.text
    assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 32)
    assert finished.usage.prompt_tokens == len(ids)
    assert finished.usage.load_s > 0
    assert whole.finished.usage.load_s == 0
    assert finished.usage.tokens_per_s is not None
    (worker,) = (worker for worker in status.workers if worker.model_name == "demo")
    assert worker.memory.total_nbytes == sum(a.nbytes for a in worker.memory.accounts) > 0
    assert worker.math_library.name


@pytest.mark.asyncio
async def test_a_seed_makes_a_stream_repeatable(address: str) -> None:
    """The same seed gives the same tokens, whether given or taken from an earlier Usage."""
    async with Client(address) as client:
        first = await client.complete(
            PROMPT, model="demo", sampling=SamplingOptions(temperature=1.0), max_tokens=24
        )
        again = SamplingOptions(temperature=1.0, seed=first.finished.usage.seed)
        second = await client.complete(PROMPT, model="demo", sampling=again, max_tokens=24)

    assert second.token_ids == first.token_ids


@pytest.mark.asyncio
async def test_a_client_that_leaves_frees_its_row(address: str) -> None:
    """After a stream is left in the middle, nothing runs; the next request is served."""
    async with Client(address) as client:
        async with client.generate(PROMPT, model="demo", sampling=EXAMPLE) as stream:
            await anext(stream)
        async with client.watch_status(interval_s=0.1) as statuses:
            async for status in statuses:
                if not any(worker.streams_running for worker in status.workers):
                    break

        assert (
            await client.complete(PROMPT, model="demo", max_tokens=2)
        ).finished.usage.completion_tokens == 2


@pytest.mark.asyncio
async def test_bad_requests_name_the_field_and_harm_nobody(address: str) -> None:
    """The client gets the same classes that the server raised; the next good request succeeds."""
    async with Client(address) as client:
        with pytest.raises(ModelNotFound) as missing:
            await client.complete(PROMPT, model="nobody")
        with pytest.raises(InvalidRequest) as empty:
            await client.complete("", model="demo")
        with pytest.raises(InvalidRequest) as hot:
            await client.complete(
                PROMPT, model="demo", sampling=SamplingOptions(temperature=101.0, top_p=2.0)
            )
        with pytest.raises(InvalidRequest) as unknown_id:
            await client.complete([1 << 30], model="demo", max_tokens=1)

        good = await client.complete(PROMPT, model="demo", max_tokens=2)
    assert missing.value.model == "nobody"
    assert [v.field for v in empty.value.violations] == ["text"]
    assert [v.field for v in hot.value.violations] == ["sampling.temperature", "sampling.top_p"]
    assert [v.field for v in unknown_id.value.violations] == ["tokens.ids"]
    assert good.finished.usage.completion_tokens == 2


@pytest.mark.asyncio
async def test_models_come_and_go(address: str, tmp_path: Path) -> None:
    """A folder is reckoned, loaded, listed, used, unloaded; a broken one is refused by file."""
    folder = write_tiny_model(tmp_path / "tiny")
    broken = tmp_path / "broken"
    broken.mkdir()
    async with Client(address) as client:
        report = await client.fit(str(folder))
        spec = LoadSpec(context_length=64, rows_max=2, weights=Weights.FLOAT32)
        async with client.load(str(folder), name="mine", options=spec) as updates:
            seen = [update async for update in updates]
        listed = await client.model("mine")
        done = await client.complete("a", model=listed.digest, max_tokens=200)
        unloaded = await client.unload("mine")
        again = await client.unload("mine")
        with pytest.raises(InvalidModel) as caught:
            async with client.load(str(broken)) as updates:
                assert [update async for update in updates]

    assert report.fits_now
    assert report.need_nbytes == sum(term.nbytes for term in report.terms)
    assert seen[-1].model.state is ModelState.READY
    assert (listed.context_length, listed.rows_max) == (64, 2)
    assert listed.resident_nbytes > 0
    assert done.finished.reason in {FinishReason.CONTEXT, FinishReason.EOS}
    assert unloaded.model.state is ModelState.UNLOADED
    assert again.model.state is ModelState.UNLOADED
    assert caught.value.file == "config.json"


@pytest.mark.asyncio
async def test_the_command_line_does_the_same(address: str) -> None:
    """generate, ps, models, status and fit against the real server."""
    async with Client(address) as client:
        wanted = await client.complete(PROMPT, model="demo", sampling=GREEDY, max_tokens=16)
        text, listed, known, status, fit = await asyncio.gather(
            mlxd("generate", "demo", PROMPT, "--temperature", "0", "--max-tokens", "16",
                 "--stats", "--address", address),
            mlxd("ps", "--address", address),
            mlxd("models", "--address", address),
            mlxd("status", "--json", "--address", address),
            mlxd("fit", "demo", "--address", address),
        )  # fmt: skip

    assert text.out.removesuffix("\n") == wanted.text.removesuffix("\n")
    assert text.err.startswith("16 tokens, ")
    assert "demo" in {row[0] for row in listed.rows if row[-1] == "ready"}
    assert "demo" in {row[0] for row in known.rows}
    assert "demo" in {worker["model_name"] for worker in status.objects[0]["workers"]}
    assert ["verdict", "fits now"] in fit.rows
    assert [ran.code for ran in (text, listed, known, status, fit)] == [0] * 5


@pytest.mark.asyncio
async def test_the_python_example_streams(address: str) -> None:
    """examples/python/stream.py, run as its first lines say."""
    async with Client(address) as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PYTHON / "stream.py"), address, "demo", PROMPT,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
        wanted = await expected_output(client)

    assert process.returncode == 0, err.decode()
    assert out.decode() == f"{wanted.text}\n"
    assert f"completion_tokens={wanted.finished.usage.completion_tokens}" in err.decode()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node example, installed beside a copy of the .proto files as its lock file says."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on PATH (make tools installs it)")
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "proto", root / "proto")
    shutil.copytree(NODE, root / "examples" / "node", ignore=shutil.ignore_patterns("node_modules"))
    folder = root / "examples" / "node"
    subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=folder, check=True, timeout=NPM_LIMIT_S, stdin=subprocess.DEVNULL,
        capture_output=True,
    )  # fmt: skip
    return folder


async def stream_in_node(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run the Node example to its end."""
    process = await asyncio.create_subprocess_exec(
        "node", "stream.mjs", *arguments,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.timeout(NPM_LIMIT_S + 2 * LIMIT_S)
@pytest.mark.asyncio
async def test_a_node_client_streams_from_the_proto_files_alone(address: str, node: Path) -> None:
    """The same text as in Python, with usage and a 64-bit seed; an error with its code."""
    async with Client(address) as client:
        code, out, err = await stream_in_node(node, address, "demo", PROMPT)
        bad_code, bad_out, bad_err = await stream_in_node(node, address, "nobody", PROMPT)
        wanted = await expected_output(client)

    assert code == 0, err
    assert out == f"{wanted.text}\n"
    end = json.loads(err.splitlines()[-1])
    assert end["finish"] == f"FINISH_REASON_{wanted.finished.reason.name}"
    assert end["usage"]["completion_tokens"] == wanted.finished.usage.completion_tokens
    assert end["usage"]["seed"] == "42"
    assert (bad_code, bad_out) == (1, "")
    assert bad_err.startswith("NOT_FOUND: no model 'nobody'")


def test_the_lock_file_names_no_host() -> None:
    """Everybody's npm takes the packages from their own registry, and holds to the hashes."""
    packages = json.loads((NODE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    fetched = [package for path, package in packages.items() if path]

    assert fetched
    assert all(package["integrity"].startswith("sha512-") for package in fetched)
    assert not any("resolved" in package for package in fetched)


def unary(channel: grpc.aio.Channel, method: str, request: Any, answer: Any) -> Any:
    """Call `method` with messages that have no stub."""
    call: Any = channel.unary_unary(
        method,
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return call(request)


@pytest.mark.asyncio
async def test_generic_tools_find_their_way(address: str) -> None:
    """Reflection lists the services; health is SERVING for the process, each service and model."""
    async with grpc.aio.insecure_channel(address) as channel:
        reflect: Any = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in reflect(iter([request]))]
        async with Client(address) as client:
            await client.complete(PROMPT, model="demo", max_tokens=1)
        health = {
            name: await unary(
                channel,
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest(service=name),
                health_pb2.HealthCheckResponse,
            )
            for name in ("", *SERVICES, "models/demo")
        }

    listed = {service.name for service in answers[0].list_services_response.service}
    assert listed >= {*SERVICES, "grpc.health.v1.Health"}
    assert {answer.status for answer in health.values()} == {health_pb2.HealthCheckResponse.SERVING}


@pytest.mark.asyncio
async def test_the_demo_shows_text_and_figures() -> None:
    """`make demo`: the prompt and its continuation, then speed, memory and the math library."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mlxd_controller.demo",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert process.returncode == 0, err.decode()
    text = out.decode()
    assert text.startswith(PROMPT)
    for figure in ("tokens/s", "first token", "held by the model", "threads"):
        assert figure in text.splitlines()[-1]


@pytest.mark.asyncio
async def test_the_demo_fails_aloud(tmp_path: Path) -> None:
    """A demo that cannot run says why, with the server's log, and exits with 1."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mlxd_controller.demo", "--model", str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert process.returncode == 1
    assert "config.json" in err.decode()
