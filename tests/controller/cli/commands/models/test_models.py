"""`mlxd ps`, `models`, `load`, `unload`, `fit`, `status`: processes against a scripted server."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from mlxd.v1 import model_pb2, types_pb2
from mlxd_shared.domain import errors
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import LIMIT_S, mlxd, start
from tests.support.terminal import on_terminal

_M = TypeVar("_M")
ESCAPE = "\x1b"


def only(fake: FakeServer, kind: type[_M]) -> _M:
    """The one request that came, of this kind."""
    (request,) = fake.requests
    assert isinstance(request, kind)
    return request


@pytest.mark.asyncio
async def test_ps_shows_what_is_in_memory() -> None:
    """Every column, no colour and no frame in a pipe; a failure is explained on stderr."""
    known = [
        replies.model(priority=5),
        replies.model("cold", state="UNLOADED"),
        replies.model("coming", state="LOADING"),
        replies.model("broken", state="FAILED", error="config.json: not JSON"),
    ]
    async with serving(Answers(models=known)) as fake:
        ran = await mlxd("ps", "--address", fake.address)

    assert ran.rows == [
        [
            "NAME",
            "DIGEST",
            "SIZE",
            "DEVICE",
            "CONTEXT",
            "STREAMS",
            "PRIORITY",
            "PROMPTS",
            "UNTIL",
            "STATE",
        ],
        ["demo", "0123456789ab", "12.0 MiB", "cpu", "512", "1", "5", "1.5 s", "for ever", "ready"],
        ["coming", "0123456789ab", "12.0 MiB", "cpu", "512", "1", "0", "1.5 s", "-", "loading 50%"],
        ["broken", "0123456789ab", "-", "-", "-", "0", "0", "-", "-", "failed"],
    ]
    assert ESCAPE not in ran.out
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    assert ran.err == "mlxd: broken: config.json: not JSON\n"


LONG = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.asyncio
async def test_lists_fit_a_terminal_of_80_columns() -> None:
    """Whole columns go, such as the path; no name, state or size is broken or goes with them."""
    known = [replies.model(LONG), replies.model("coming", state="LOADING")]
    async with serving(Answers(models=known)) as fake:
        async with on_terminal("ps", "--address", fake.address) as loaded:
            assert await loaded.wait_ended() == 0
        async with on_terminal("models", "--address", fake.address) as listed:
            assert await listed.wait_ended() == 0

    for terminal in (loaded, listed):
        lines = terminal.screen.splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= 80
        assert lines[1].startswith(f"{LONG}  ")
        assert "loading 50%" in lines[2]
    assert loaded.screen.split()[:5] == ["NAME", "SIZE", "STREAMS", "UNTIL", "STATE"]
    assert listed.screen.split()[:5] == ["NAME", "STORED", "CONTEXT", "STATE", "STORE"]


@pytest.mark.asyncio
async def test_models_shows_all() -> None:
    """Names with aliases, and where each model lives; --json has every field."""
    known = [replies.model(), replies.model("cold", state="UNLOADED")]
    known[1].machine = "b"
    async with serving(Answers(models=known)) as fake:
        ran = await mlxd("models", "--address", fake.address)
        (models,) = (await mlxd("models", "--json", "--address", fake.address)).objects

    assert ran.rows[1] == [
        "demo, tiny", "0123456789ab", "LlamaForCausalLM", "8.0 MiB", "1024", "ready", "/models/demo"
    ]  # fmt: skip
    assert (ran.rows[2][5], ran.rows[2][-1]) == ("unloaded", "b:/models/cold")
    assert [(model["machine"], model["path"]) for model in models] == [
        ("", "/models/demo"), ("b", "/models/cold")
    ]  # fmt: skip
    assert [model["name"] for model in models] == ["demo", "cold"]
    assert models[0]["stored_nbytes"] == 8 * replies.MIB
    assert models[0]["state"] == "ready"
    assert models[0]["last_used_time"].startswith("2025-06-15T")


@pytest.mark.asyncio
async def test_load_sends_an_absolute_path_and_its_options(tmp_path: Path) -> None:
    """A path of the user's folder means the same on the server; progress is told on stderr."""
    (tmp_path / "mine").mkdir()
    async with serving(Answers(load=replies.load_steps())) as fake:
        ran = await mlxd(
            "load", "./mine", "--name", "n", "--context", "512", "--rows", "2",
            "--weights", "stored", "--kv-format", "q4", "--prefix-cache", "1.5M",
            "--keep-alive", "5m", "--pin", "--priority", "-3", "--temperature", "0.25",
            "--xtc-probability", "0.5", "--xtc-threshold", "0.125",
            "--address", fake.address, cwd=tmp_path,
        )  # fmt: skip
        request = only(fake, model_pb2.LoadModelRequest)

    assert ran.code == 0
    assert ran.out == (
        "demo is ready: 12.0 MiB on cpu, context 512, 4 rows, weights float32,"
        " keys and values in 8 bits, prefix cache 3.0 MiB\n"
    )
    assert ran.err == "demo: LOADING\ndemo: READY\n"
    assert (request.model, request.name) == (str(tmp_path / "mine"), "n")
    options = request.options
    assert (options.context_length, options.rows_max) == (512, 2)
    assert options.weights == types_pb2.WEIGHTS_FORMAT_STORED
    assert options.kv_format == types_pb2.KV_FORMAT_Q4
    assert options.prefix_cache_bytes == 3 << 19
    assert (options.keep_alive.seconds, options.pinned) == (300, True)
    assert options.priority == -3
    assert options.sampling == types_pb2.SamplingOptions(
        temperature=0.25, xtc_probability=0.5, xtc_threshold=0.125
    )


def all_of(terminal: int) -> bytes:
    """Return what was written to a terminal that nobody writes to any more; it comes in pieces."""
    shown = b""
    with suppress(OSError):  # which is how it ends
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    return shown


@pytest.mark.asyncio
async def test_load_shows_a_bar_on_a_terminal() -> None:
    """On a terminal the bytes are counted in a bar that is gone when the load is done."""
    ours, theirs = pty.openpty()
    async with serving(Answers(load=replies.load_steps())) as fake:
        process = await start(
            "load", "demo", "--address", fake.address, stderr=theirs, environment={"TERM": "xterm"}
        )
        out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    os.close(theirs)
    shown = all_of(ours).decode()
    os.close(ours)

    assert process.returncode == 0
    assert out.startswith(b"demo is ready")
    assert "8.0/8.0 MiB" in shown or "4.0/8.0 MiB" in shown
    assert ESCAPE in shown


@pytest.mark.asyncio
async def test_a_load_that_is_left_goes_on_and_says_so() -> None:
    """Ctrl-C ends the command alone: the load is the server's."""
    async with serving(Answers(load=replies.load_steps()[:1], hold_load=True)) as fake:
        process = await start("load", "demo", "--address", fake.address)
        assert process.stderr is not None
        begun = await asyncio.wait_for(process.stderr.readline(), LIMIT_S)
        process.send_signal(signal.SIGINT)
        _, rest = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, begun) == (130, b"demo: LOADING\n")
    assert rest == b"mlxd: the server goes on loading demo; `mlxd unload demo` ends that\n"


@pytest.mark.asyncio
async def test_a_bare_word_is_a_name_even_beside_a_folder(tmp_path: Path) -> None:
    """The server is asked for the name; when it has none, the folder is pointed out."""
    (tmp_path / "mine").mkdir()
    async with serving(Answers(load=[errors.ModelNotFound("mine")])) as fake:
        ran = await mlxd("load", "mine", "--address", fake.address, cwd=tmp_path)
        request = only(fake, model_pb2.LoadModelRequest)

    assert (request.model, ran.code) == ("mine", 3)
    assert ran.err == "mlxd: no model 'mine': for the folder that is here, write ./mine\n"


@pytest.mark.asyncio
async def test_fit_explains_every_term() -> None:
    """Each term with its bytes and note, the sum, the budget and the verdict."""
    step = model_pb2.LoadModelResponse(fit=replies.fit(now=False, evict=("other",)))
    async with serving(Answers(load=[step])) as fake:
        ran = await mlxd(
            "fit", "demo", "--context", "512", "--kv-format", "model", "--prefix-cache", "0",
            "--address", fake.address,
        )  # fmt: skip
        request = only(fake, model_pb2.LoadModelRequest)

    assert request.validate_only
    assert request.options.context_length == 512
    assert request.options.kv_format == types_pb2.KV_FORMAT_MODEL
    assert request.options.HasField("prefix_cache_bytes")
    assert request.options.prefix_cache_bytes == 0
    assert ran.code == 0
    rows = ran.rows
    assert ["weights", "10485760", "10.0 MiB", "float32 of 8-bit"] in rows
    assert ["total", "11534336", "11.0 MiB"] in rows
    assert ["budget", "100.0 MiB"] in rows
    assert "keys and values in 8 bits, prefix cache 3.0 MiB" in ran.out
    assert ["verdict", "fits after evicting"] in rows
    assert ["would evict", "other (reload 2.0 s, prompts 0.5 s)"] in rows


@pytest.mark.asyncio
async def test_fit_fails_where_the_model_never_fits() -> None:
    """5, with what would make it fit on stderr; --json has the same figures."""
    step = model_pb2.LoadModelResponse(fit=replies.fit(now=False, ever=False))
    async with serving(Answers(load=[step])) as fake:
        text = await mlxd("fit", "demo", "--address", fake.address)
        programs = await mlxd("fit", "demo", "--json", "--address", fake.address)

    assert (text.code, programs.code) == (5, 5)
    assert "can never fit" in text.out
    assert text.err == "mlxd: to make it fit: a context of 64 tokens\n"
    assert programs.objects[0]["need_nbytes"] == 11 * replies.MIB


@pytest.mark.asyncio
async def test_unload_sends_grace_and_force() -> None:
    """And says how many streams it ended."""
    answer = model_pb2.UnloadModelResponse(model=replies.model(state="UNLOADED"), streams_aborted=2)
    async with serving(Answers(unload=answer)) as fake:
        ran = await mlxd("unload", "demo", "--grace", "1.5s", "--force", "--address", fake.address)
        request = only(fake, model_pb2.UnloadModelRequest)

    assert (request.grace.ToMilliseconds(), request.force) == (1500, True)
    assert (ran.code, ran.out) == (0, "demo is unloaded; 2 streams ended\n")


@pytest.mark.asyncio
async def test_forget_tells_what_names_are_left() -> None:
    """As a line, or as JSON; what the server refuses is its error."""
    answer = model_pb2.ForgetModelResponse(names=["a", "b"])
    async with serving(Answers(forget=answer)) as fake:
        ran = await mlxd("forget", "c", "--address", fake.address)
        assert only(fake, model_pb2.ForgetModelRequest).name == "c"
        programs = await mlxd("forget", "c", "--json", "--address", fake.address)
        fake.answers.forget = model_pb2.ForgetModelResponse()
        last = await mlxd("forget", "c", "--address", fake.address)
        fake.answers.forget = errors.ModelNotFound("c", "no load has given this name")
        missing = await mlxd("forget", "c", "--address", fake.address)

    assert (ran.code, ran.out) == (0, "c is forgotten; also known as a, b\n")
    assert programs.objects == [{"name": "c", "names": ["a", "b"]}]
    assert last.out == "c is forgotten\n"
    assert (missing.code, missing.out) == (3, "")
    assert "no load has given this name" in missing.err


@pytest.mark.asyncio
async def test_status_shows_memory_and_the_math_library() -> None:
    """What a user asks first: how much is held, by what, on which BLAS, and what went wrong."""
    async with serving(Answers(statuses=[replies.status()])) as fake:
        ran = await mlxd("status", "--address", fake.address)

    assert ran.code == 0
    assert "mlxd 9.8.7, pid 4242, up 1m30s" in ran.out
    assert "4.0 GiB of 8.0 GiB available, 70.0 MiB in mlxd" in ran.out
    assert "cpu (MLX 0.32.4), OpenBLAS 0.3.30, 2 threads, compiled steps off" in ran.out
    assert "12.0 MiB held (weights 12.0 MiB), -64 B unaccounted" in ran.out
    assert "going down" in ran.out


@pytest.mark.asyncio
async def test_watching_goes_on_until_ctrl_c() -> None:
    """--watch --json is one object a status; SIGINT ends it with 130."""
    async with serving(Answers(statuses=[replies.status()] * 2, hold=True)) as fake:
        process = await start(
            "status", "--watch", "--interval", "100ms", "--json", "--address", fake.address
        )
        assert process.stdout is not None
        lines = [await asyncio.wait_for(process.stdout.readline(), LIMIT_S) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert lines[0] == lines[1] != b""
    assert process.returncode == 130
