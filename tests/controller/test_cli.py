"""`mlxd` as a process against a scripted server: what it prints, sends, and ends with."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest
import typer

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_controller.cli.outcome import model_argument
from mlxd_controller.cli.serve import _named_folder, _reserve
from mlxd_shared import errors
from mlxd_shared.errors import MlxdError
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import LIMIT_S, mlxd, start

_M = TypeVar("_M")
ESCAPE = "\x1b"


def only(fake: FakeServer, kind: type[_M]) -> _M:
    """The one request that came, of this kind."""
    (request,) = fake.requests
    assert isinstance(request, kind)
    return request


@pytest.mark.asyncio
async def test_help_names_every_command_and_exit_code() -> None:
    """A user without a manual finds the commands, the options of each, and how they end."""
    ran, version = await mlxd("--help"), await mlxd("version")

    for command in (
        "serve", "load", "unload", "ps", "models", "generate", "tokenize", "status", "fit",
    ):  # fmt: skip
        assert f"\n  {command} " in ran.out
    assert "130 interrupted" in " ".join(ran.out.split())
    assert "--install-completion" in ran.out
    assert version.out.startswith("mlxd ")


@pytest.mark.asyncio
async def test_generate_prints_the_text_alone() -> None:
    """stdout has the completion, which ends its line; --stats goes to stderr."""
    async with serving(Answers(generate=replies.story())) as fake:
        ran = await mlxd("generate", "demo", "hi", "--stats", "--address", fake.address)

    assert (ran.code, ran.out) == (0, "Once upon ä\n")
    assert ran.err == (
        "4 tokens, 6.0 tokens/s, first token after 261 ms (queue 1, load 250, prompt 10),"
        " prompt 5 tokens, 2 cached, seed 18446744073709551615, ended by length\n"
    )


@pytest.mark.asyncio
async def test_generate_sends_each_flag() -> None:
    """Every option arrives in its field, and a piped prompt loses its last newline only."""
    async with serving(Answers(generate=replies.story())) as fake:
        ran = await mlxd(
            "generate", "demo", "--max-tokens", "4", "--stop", "a", "--stop", "b c",
            "--stop-token-id", "7", "--ignore-eos", "--temperature", "0", "--top-k", "-1",
            "--top-p", "0.5", "--min-p", "0.25", "--seed", "0", "--logit-bias", "3=-1.5",
            "--keep-alive", "-1", "--request-id", "mine", "--address", fake.address,
            piped="one\ntwo\n\n",
        )  # fmt: skip
        request = only(fake, inference_pb2.GenerateRequest)

    assert ran.code == 0
    assert (request.model, request.text) == ("demo", "one\ntwo\n")
    assert (request.max_tokens, list(request.stop)) == (4, ["a", "b c"])
    assert (list(request.stop_token_ids), request.ignore_eos) == ([7], True)
    assert request.sampling == types_pb2.SamplingOptions(
        temperature=0, top_k=-1, top_p=0.5, min_p=0.25, seed=0, logit_bias={3: -1.5}
    )
    assert (request.keep_alive.seconds, request.request_id) == (-1, "mine")


@pytest.mark.asyncio
async def test_generate_sends_nothing_that_was_not_given() -> None:
    """Absent flags are absent on the wire, so that the model's own values hold."""
    async with serving(Answers(generate=replies.story())) as fake:
        await mlxd("generate", "demo", "x", "--address", fake.address)
        request = only(fake, inference_pb2.GenerateRequest)

    assert request == inference_pb2.GenerateRequest(
        model="demo", text="x", sampling=types_pb2.SamplingOptions()
    )


@pytest.mark.asyncio
async def test_generate_json_is_one_object_a_message() -> None:
    """Programs get every message with offsets and ids, the last with finish and usage."""
    async with serving(Answers(generate=replies.story())) as fake:
        ran = await mlxd("generate", "demo", "x", "--json", "--address", fake.address)

    *deltas, finished = ran.objects
    assert deltas[1] == {"offset": 1, "text": " upon", "token_ids": [2, 3]}
    assert finished["reason"] == "length"
    assert finished["usage"]["completion_tokens"] == 4
    assert finished["model_digest"] == replies.DIGEST


@pytest.mark.asyncio
async def test_text_comes_at_once_and_ctrl_c_cancels() -> None:
    """What has come is shown before the end; SIGINT ends the call and exits with 130."""
    answers = Answers(generate=[replies.delta(0, "Once", 1)], hold=True)
    async with serving(answers) as fake:
        process = await start("generate", "demo", "x", "--address", fake.address)
        assert process.stdout is not None
        assert process.stderr is not None
        assert await asyncio.wait_for(process.stdout.readexactly(4), LIMIT_S) == b"Once"
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, out, err) == (130, b"\n", b"")


@pytest.mark.asyncio
async def test_a_reader_that_goes_away_ends_the_call_quietly() -> None:
    """`mlxd generate ... | head -1` says nothing on stderr, and the server stops generating."""
    answers = Answers(generate=[replies.delta(n, "word " * 9999, n) for n in range(30)], hold=True)
    async with serving(answers) as fake:
        reading, writing = os.pipe()
        process = await start("generate", "m", "x", "--address", fake.address, stdout=writing)
        os.close(writing)
        os.close(reading)
        _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, err) == (141, b"")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest.of("sampling.top_p", "2.0 is outside [0, 1]"), 2),
        (errors.FieldNotServed("chat"), 2),
        (errors.ModelNotFound("gone"), 3),
        (errors.ModelTooLarge("big", 9, 8, 1), 5),
        (errors.NoRoom("big", 9, 8, 1.0), 5),
        (errors.WorkerLost("demo", 1), 1),
        (errors.ShuttingDown(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MlxdError) else str(value),
)
async def test_an_error_is_one_line_and_a_code(error: MlxdError, code: int) -> None:
    """stderr has the server's own words, with the field; the text so far stays on its line."""
    answers = Answers(generate=[replies.delta(0, "Once", 1), error])
    async with serving(answers) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert (ran.code, ran.out, ran.err) == (code, "Once\n", f"mlxd: {error.describe()}\n")


@pytest.mark.asyncio
async def test_a_stream_without_an_end_is_an_error() -> None:
    """A server that just stops is not taken for one that has finished."""
    async with serving(Answers(generate=[replies.delta(0, "Once", 1)])) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert (ran.code, ran.out) == (1, "Once\n")
    assert ran.err == "mlxd: broken stream: it ended after 1 tokens without a finish\n"


@pytest.mark.asyncio
async def test_a_stream_that_the_operator_ended_is_an_error() -> None:
    """A completion that was cut short does not look complete."""
    finish = types_pb2.Finish(reason=types_pb2.FINISH_REASON_CANCELLED)
    async with serving(Answers(generate=[replies.last(0, finish=finish)])) as fake:
        ran = await mlxd("generate", "demo", "x", "--address", fake.address)

    assert ran.code == 1
    assert "before it was complete" in ran.err


@pytest.mark.asyncio
async def test_no_server_is_its_own_code() -> None:
    """4, and what to do about it."""
    ran = await mlxd("ps", "--address", "127.0.0.1:1")

    assert (ran.code, ran.out) == (4, "")
    assert "no server answers at 127.0.0.1:1; start one with `mlxd serve`" in ran.err


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("ps", "--address", "nonsense"), "address: 'nonsense' is not"),
        (("generate", "m", "x", "--keep-alive", "soon"), "'soon' is not a duration"),
        (("generate", "m", "x", "--logit-bias", "3"), "'3' is not ID=BIAS"),
        (("generate", "m", "x", "--seed", "-1"), "sampling.seed: -1 is outside"),
        (("load", "m", "--weights", "int3"), "'int3' is not one of"),
        (("load",), "Missing argument"),
        (("serve", "--model", "a=/nowhere/at/all"), "/nowhere/at/all is not a folder"),
        (("serve", "--reserve", "100%"), "a share from 0% to 99%"),
        (("serve", "--memory-limit", "much"), "'much' is not a size"),
    ],
)
async def test_bad_usage_is_its_own_code(arguments: tuple[str, ...], problem: str) -> None:
    """2, before anything is sent, with what was wrong."""
    ran = await mlxd(*arguments, MLXD_ADDRESS="127.0.0.1:1")

    assert ran.code == 2
    assert problem in " ".join(ran.err.split())


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


@pytest.mark.asyncio
async def test_ps_shows_what_is_in_memory() -> None:
    """Every column, no colour and no frame in a pipe; a failure is explained on stderr."""
    known = [
        replies.model(),
        replies.model("cold", state="UNLOADED"),
        replies.model("coming", state="LOADING"),
        replies.model("broken", state="FAILED", error="config.json: not JSON"),
    ]
    async with serving(Answers(models=known)) as fake:
        ran = await mlxd("ps", "--address", fake.address)

    assert ran.rows == [
        ["NAME", "DIGEST", "SIZE", "DEVICE", "CONTEXT", "STREAMS", "UNTIL", "STATE"],
        ["demo", "0123456789ab", "12.0 MiB", "cpu", "512", "1", "for ever", "ready"],
        ["coming", "0123456789ab", "12.0 MiB", "cpu", "512", "1", "-", "loading 50%"],
        ["broken", "0123456789ab", "-", "-", "-", "0", "-", "failed"],
    ]
    assert ESCAPE not in ran.out
    assert all(line == line.rstrip() for line in ran.out.splitlines())
    assert ran.err == "mlxd: broken: config.json: not JSON\n"


@pytest.mark.asyncio
async def test_models_shows_all() -> None:
    """Names with aliases, and where each model lives; --json has every field."""
    known = [replies.model(), replies.model("cold", state="UNLOADED")]
    async with serving(Answers(models=known)) as fake:
        ran = await mlxd("models", "--address", fake.address)
        (found,) = (await mlxd("models", "--json", "--address", fake.address)).objects

    assert ran.rows[1] == [
        "demo, tiny", "0123456789ab", "LlamaForCausalLM", "8.0 MiB", "1024", "ready", "/models/demo"
    ]  # fmt: skip
    assert ran.rows[2][5] == "unloaded"
    assert [model["name"] for model in found] == ["demo", "cold"]
    assert found[0]["stored_nbytes"] == 8 * replies.MIB
    assert found[0]["state"] == "ready"
    assert found[0]["last_used_time"].startswith("2025-06-15T")


@pytest.mark.asyncio
async def test_load_sends_an_absolute_path_and_its_options(tmp_path: Path) -> None:
    """A path of the user's folder means the same on the server; progress is told on stderr."""
    (tmp_path / "mine").mkdir()
    async with serving(Answers(load=replies.load_steps())) as fake:
        ran = await mlxd(
            "load", "./mine", "--name", "n", "--context", "512", "--rows", "2",
            "--weights", "stored", "--keep-alive", "5m", "--pin", "--temperature", "0.25",
            "--address", fake.address, cwd=tmp_path,
        )  # fmt: skip
        request = only(fake, model_pb2.LoadModelRequest)

    assert ran.code == 0
    assert ran.out == ("demo is ready: 12.0 MiB on cpu, context 512, 4 rows, weights float32\n")
    assert ran.err == "demo: LOADING\ndemo: READY\n"
    assert (request.model, request.name) == (str(tmp_path / "mine"), "n")
    options = request.options
    assert (options.context_length, options.rows_max) == (512, 2)
    assert options.weights == types_pb2.WEIGHTS_FORMAT_STORED
    assert (options.keep_alive.seconds, options.pinned) == (300, True)
    assert options.sampling == types_pb2.SamplingOptions(temperature=0.25)


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
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)

    assert process.returncode == 0
    assert out.startswith(b"demo is ready")
    assert "8.0/8.0 MiB" in shown or "4.0/8.0 MiB" in shown
    assert ESCAPE in shown


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
        ran = await mlxd("fit", "demo", "--context", "512", "--address", fake.address)
        request = only(fake, model_pb2.LoadModelRequest)

    assert request.validate_only
    assert request.options.context_length == 512
    assert ran.code == 0
    rows = ran.rows
    assert ["weights", "10485760", "10.0 MiB", "float32 of 8-bit"] in rows
    assert ["total", "11534336", "11.0 MiB"] in rows
    assert ["budget", "100.0 MiB"] in rows
    assert ["verdict", "fits after evicting"] in rows
    assert ["would evict", "other"] in rows


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
async def test_tokenize_prints_ids() -> None:
    """One line of ids, or JSON."""
    async with serving(Answers(token_ids=[1, 2])) as fake:
        ran = await mlxd("tokenize", "demo", "a b", "--no-special", "--address", fake.address)
        request = only(fake, inference_pb2.TokenizeRequest)
        programs = await mlxd("tokenize", "demo", "--json", "--address", fake.address, piped="a")

    assert (ran.out, programs.objects) == ("1 2\n", [[1, 2]])
    assert (request.text, request.add_special_tokens) == ("a b", False)


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
