"""What `mlxd` says of TLS that does not match, text that is none, workers that said nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mlxd_controller.store.model_library import Library
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from mlxd_shared.security.listeners import OPEN, ListenerFiles, ListenerSecurity
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.certificates import Authority, token_file
from tests.support.cli import mlxd


@asynccontextmanager
async def health_server(security: ListenerSecurity) -> AsyncIterator[str]:
    """A server of nothing but health; yields its address."""
    health = Health()
    server = make_server(health, (), security=security)
    address = listen(server, parse_address("127.0.0.1:0"), security=security)
    await health.set("", serving=True)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@pytest.mark.asyncio
async def test_plain_text_to_a_tls_server_points_at_tls_ca(tmp_path: Path) -> None:
    """Something answers, so that "start a server" would be the wrong advice."""
    pair = Authority(tmp_path).issue()
    async with health_server(ListenerFiles(pair.cert, pair.key).load()) as address:
        ran = await mlxd("health", "--address", address)

    assert ran.code == 4
    assert "a server with TLS needs --tls-ca" in ran.err


@pytest.mark.asyncio
async def test_a_token_that_is_missing_points_at_token_file(tmp_path: Path) -> None:
    """The name of a status would be no advice."""
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o600)
    async with health_server(ListenerFiles(token_file=token).load()) as address:
        ran = await mlxd("health", "--address", address)

    assert ran.code == 1
    assert ran.err == (
        f"mlxd: valid credentials are needed by the server at {address}: see --token-file\n"
    )


@pytest.mark.asyncio
async def test_what_reaches_a_server_may_follow_the_command(tmp_path: Path) -> None:
    """As --address may: the certificate and the token too; they go before what stands before."""
    authority, token = Authority(tmp_path), token_file(tmp_path)
    pair = authority.issue()
    wrong = ("--tls-ca", f"{tmp_path}/none", "--token-file", f"{tmp_path}/none")
    async with health_server(ListenerFiles(pair.cert, pair.key, token_file=token).load()) as at:
        ran = await mlxd(
            *wrong, "health", "--tls-ca", f"{authority.path}", "--token-file", f"{token}",
            "--address", at,
        )  # fmt: skip

    assert (ran.code, ran.out) == (0, "SERVING\n"), ran.err


@pytest.mark.asyncio
async def test_tls_that_does_not_match_is_told_from_no_server(tmp_path: Path) -> None:
    """TLS to a plain server, and a certificate of others, both speak of --tls-ca."""
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    pair = others.issue()
    with_ours = ("--tls-ca", f"{ours.path}", "--address")
    async with (
        health_server(OPEN) as plain,
        health_server(ListenerFiles(pair.cert, pair.key).load()) as foreign,
    ):
        to_plain = await mlxd(*with_ours, plain, "health")
        to_foreign = await mlxd(*with_ours, foreign, "health")

    for ran in (to_plain, to_foreign):
        assert ran.code == 4
        assert "no TLS with what listens at" in ran.err


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    """What the system says of it, by the flag, and nothing of gRPC's own beside the log."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ran = await mlxd(
            "serve", "--address", address, "--log-format", "json", "--run-dir", f"{tmp_path}/run"
        )

    said = [line for line in ran.err.splitlines() if not line.startswith("{")]
    assert (ran.code, said) == (
        2,
        [f"mlxd: --address: cannot listen on {address}: Address already in use"],
    )


HALF = "half a character (a lone surrogate)"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("generate", "m", "a\udcffb"), f"text: {HALF} at character 1"),
        (("unload", "\udcff"), f"model: {HALF} at character 0"),
        (("generate", "m", "a", "--request-id", "\udcff"), f"--request-id: {HALF} at character 0"),
        (
            ("generate", "m", "a", "--regex", "\udcff"),
            f"--regex: {HALF} at character 0",
        ),
        (("tokenize", "m", "\udcff"), f"text: {HALF} at character 0"),
    ],
)
async def test_what_is_not_utf8_is_bad_usage(arguments: tuple[str, ...], problem: str) -> None:
    """Bytes that are no text are refused in one line, before anything is sent."""
    async with serving(Answers()) as fake:
        ran = await mlxd(*arguments, "--address", fake.address)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"mlxd: {problem}\n"
    assert not fake.requests


@pytest.mark.asyncio
async def test_an_error_speaks_of_the_flag_that_was_given() -> None:
    """The server's words for a field are not the user's; a field that no flag set keeps them."""
    refusals = {
        ("load", "m", "--context", "9"): "options.context_length",
        ("load", "m", "--rows", "9"): "options.rows_max",
        ("load", "m", "--logit-bias", "9=1"): "options.sampling.logit_bias[9]",
        ("fit", "m", "--rows", "9"): "options.kv_format",
    }
    for (*command, flag, value), name in refusals.items():
        refusal = InvalidRequest.of(name, "is too much")
        async with serving(Answers(load=[refusal])) as fake:
            ran = await mlxd(*command, flag, value, "--address", fake.address)
        spoken_of = name if name.endswith("kv_format") else flag
        assert (ran.code, ran.err) == (2, f"mlxd: {spoken_of}: is too much\n")


@pytest.mark.asyncio
async def test_a_worker_that_never_told_its_figures_has_none() -> None:
    """One that died before it could speak shows who it was and how it ended, and no zeros."""
    status = replies.status()
    del status.workers[:]
    worker = status.workers.add(model_name="demo", last_error="it died", exit_code=3)
    worker.last_lines.append("oh no")
    async with serving(Answers(statuses=[status])) as fake:
        ran = await mlxd("status", "--address", fake.address)

    assert ran.code == 0
    assert "runs on" not in ran.out
    assert "0 threads" not in ran.out
    for phrase in ("pid -", "it died", "3", "oh no"):
        assert phrase in ran.out


@pytest.mark.asyncio
async def test_the_last_words_of_a_worker_are_for_people() -> None:
    """What happened and why, in a few lines, and none of the JSON in which workers write."""
    status = replies.status()
    del status.workers[:]
    worker = status.workers.add(model_name="demo", last_error="it died", exit_code=3)
    crash = {"event": "bug", "level": "error", "component": "worker", "timestamp": "2026",
             "model": "demo", "exception": "Traceback:\n  at x\nValueError: no"}  # fmt: skip
    worker.last_lines.extend(["first", "[1]", "{}", json.dumps(crash), "a", "b"])
    async with serving(Answers(statuses=[status])) as fake:
        ran = await mlxd("status", "--address", fake.address)

    assert [row[-1] for row in ran.rows[-5:]] == [
        "[1]", "{}", "error: bug (model demo, exception ValueError: no)", "a", "b"
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_a_path_too_long_to_look_at_is_not_found() -> None:
    """The system's own refusal is the client's mistake, not a bug."""
    store = Library(())
    with pytest.raises(ModelNotFound) as caught:
        await store.add(Path("/" + "a" * 5000), name="")
    assert "too long" in caught.value.describe()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "command", [("generate", "m"), ("embed", "m"), ("score", "m", "a"), ("run", "m")]
)
async def test_a_standard_input_that_is_no_text_is_bad_usage(command: tuple[str, ...]) -> None:
    """Also where Python is told to take no such bytes for characters."""
    ran = await mlxd(*command, piped=b"a\xff", PYTHONIOENCODING="utf-8:strict")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "mlxd: the standard input is not UTF-8 text\n"


@pytest.mark.asyncio
async def test_nothing_in_a_model_steers_the_terminal() -> None:
    """Its names and errors are told with their control characters as escapes; JSON too."""
    status = replies.status()
    del status.workers[:]
    status.workers.add(model_name="demo", last_error="tensor \x1b]0;owned\x07 \x9b2J")
    async with serving(Answers(statuses=[status])) as fake:
        table = await mlxd("status", "--address", fake.address)
        as_json = await mlxd("status", "--json", "--address", fake.address)
    assert "tensor \\x1b]0;owned\\x07 \\x9b2J" in table.out
    assert "\\u009b2J" in as_json.out
    assert not {"\x1b", "\x07", "\x9b"} & {*table.out, *as_json.out}
    assert as_json.objects[0]["workers"][0]["last_error"].endswith("\x9b2J")


@pytest.mark.asyncio
async def test_no_refusal_steers_the_terminal() -> None:
    """What a file calls its tensors comes back in errors."""
    error = InvalidModel("it is cut", "model.safetensors", "a\x1b[2Jb")
    async with serving(Answers(statuses=[error])) as fake:
        ran = await mlxd("status", "--address", fake.address)
    assert ran.err == "mlxd: model.safetensors: a\\x1b[2Jb: it is cut\n"
