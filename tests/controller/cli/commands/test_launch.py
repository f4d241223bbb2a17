"""`mlxd launch`: what each agent is started with, and what is said where it cannot be."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.agents import AGENTS, KEY, Target
from tests.support.cli import Ran, mlxd

TOKEN = "t" * 32
SHOW = """#!/bin/sh
env | grep -E '^(ANTHROPIC|CLAUDE|OPENCODE|MLXD_API|CODEX)' | sort
for argument in "$@"; do echo "argument $argument"; done
exit 7
"""


class _Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway does that knows `served`, and `claude-*` by a pattern."""

    token = ""

    def do_GET(self) -> None:
        """Answer one request."""
        if self.token and self.headers["Authorization"] != f"Bearer {self.token}":
            self._answer(HTTPStatus.UNAUTHORIZED, {})
        elif self.path == "/v1/models":
            self._answer(HTTPStatus.OK, {"data": [{"id": "org/served"}]})
        elif self.path in ("/v1/models/org/served", "/v1/models/claude-sonnet-4-5"):
            self._answer(HTTPStatus.OK, {"id": self.path})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {})

    def _answer(self, status: HTTPStatus, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any, **__: Any) -> None:
        """Say nothing."""


@contextmanager
def gateway(token: str = "") -> Iterator[str]:
    """Serve such a gateway around the body; yield its URL."""
    handler = type("Gateway", (_Gateway,), {"token": token})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(name="path")
def write_programs(tmp_path: Path) -> str:
    """Write a program of each agent's name that shows what it is started with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.program
        program.write_text(SHOW)
        program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def lines_of(ran: Ran) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments that a program has shown; it has its own exit code."""
    assert ran.code == 7, ran.err
    lines = ran.out.splitlines()
    arguments = [line.removeprefix("argument ") for line in lines if line.startswith("argument ")]
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("argument "))
    return variables, arguments


@pytest.mark.asyncio
async def test_claude_code(path: str) -> None:
    """Each of its sizes is the model; another service's key stays behind; the rest is its own."""
    with gateway() as url:
        line = ("launch", "claude", "org/served", "--url", url, "--", "--resume", "--", "-p")
        ran = await mlxd(*line, PATH=path, ANTHROPIC_API_KEY="sk-secret")
        named_by_itself = await mlxd("launch", "claude", "--url", f"{url}/", PATH=path)
    variables, arguments = lines_of(ran)
    assert arguments == ["--resume", "--", "-p"]
    assert "ANTHROPIC_API_KEY" not in variables
    assert variables == {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "mlxd",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **dict.fromkeys(
            ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
             "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
             "CLAUDE_CODE_SUBAGENT_MODEL"],
            "org/served",
        ),
    }  # fmt: skip
    own, _ = lines_of(named_by_itself)
    assert (own["ANTHROPIC_BASE_URL"], "ANTHROPIC_MODEL" in own) == (url, False)


@pytest.mark.asyncio
async def test_codex(path: str, tmp_path: Path) -> None:
    """A provider by overrides of its configuration; the token is in the variable it names."""
    (tmp_path / "token").write_text(TOKEN)
    with gateway(TOKEN) as url:
        line = ("launch", "codex", "org/served", "--url", url, "--", "exec", "hi")
        ran = await mlxd("--token-file", str(tmp_path / "token"), *line, PATH=path)
    variables, arguments = lines_of(ran)
    assert variables == {KEY: TOKEN}
    assert "every user can read" in ran.err
    assert arguments[-2:] == ["exec", "hi"]
    assert arguments[:-2:2] == ["-c"] * 8
    assert arguments[1:-2:2] == [
        'web_search="disabled"', "features.multi_agent=false",
        'model_provider="mlxd"', 'model_providers.mlxd.name="mlxd"',
        f'model_providers.mlxd.base_url="{url}/v1"', f'model_providers.mlxd.env_key="{KEY}"',
        'model_providers.mlxd.wire_api="responses"', 'model="org/served"',
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_opencode(path: str) -> None:
    """A configuration in a variable: the provider with every model, and the one that is meant."""
    with gateway() as url:
        chosen = await mlxd("launch", "opencode", "org/served", "--url", url, PATH=path)
        free = await mlxd("launch", "opencode", "--url", url, PATH=path)
    variables, _ = lines_of(chosen)
    content = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert (content["model"], content["small_model"]) == ("mlxd/org/served",) * 2
    provider = content["provider"]["mlxd"]
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": f"{{env:{KEY}}}"}
    assert list(provider["models"]) == ["org/served"]
    assert variables[KEY] == "mlxd"
    others, _ = lines_of(free)
    assert json.loads(others["OPENCODE_CONFIG_CONTENT"]) == {"provider": content["provider"]}


@pytest.mark.asyncio
async def test_what_is_printed_does_the_same(path: str, tmp_path: Path) -> None:
    """A shell that reads it starts the program so; it holds no secret, and needs no program."""
    token = tmp_path / "a token"
    token.write_text(TOKEN)
    options = ("launch", "claude", "org/served", "--token-file", str(token), "--print")
    with gateway(TOKEN) as url:
        printed = await mlxd(*options, "--url", url, "--", "a b", PATH="/usr/bin:/bin")
    assert (printed.code, TOKEN in printed.out) == (0, False)
    assert printed.out.splitlines()[-1] == shlex.join(["claude", "a b"])
    shell = await asyncio.to_thread(
        subprocess.run,
        ["/bin/sh"], input=printed.out, env={"PATH": path}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    variables, arguments = lines_of(Ran(shell.returncode, shell.stdout, shell.stderr))
    assert (variables["ANTHROPIC_AUTH_TOKEN"], arguments) == (TOKEN, ["a b"])


TROUBLE = [
    (("claude", "other"), 3, "no model 'other' at URL; known: org/served"),
    (("codex",), 2, "give Codex's own names one: mlxd alias 'gpt-*' MODEL"),
    (("claude",), 1, "Claude Code is not installed: no claude on PATH; see https://"),
    (("claude", "--url", "ftp://a"), 2, "--url ftp://a: write http://HOST:PORT"),
    (("claude", "--url", "http://127.0.0.1:1"), 4, "start one with `mlxd serve --http`"),
    (("claude", "--token-file", "none"), 2, "none"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("arguments", "code", "words"), TROUBLE)
async def test_what_cannot_be_is_told(arguments: tuple[str, ...], code: int, words: str) -> None:
    """In a line that says what to do, by the exit code of its kind."""
    with gateway() as url:
        where = () if "--url" in arguments else ("--url", url)
        ran = await mlxd("launch", *arguments, *where, PATH="/nowhere")
    assert (ran.code, ran.out) == (code, "")
    assert words.replace("URL", url) in ran.err


@pytest.mark.asyncio
async def test_a_gateway_with_a_token_says_so() -> None:
    """And what is no gateway at all is no server."""
    with gateway(TOKEN) as url:
        ran = await mlxd("launch", "claude", "--url", url)
        elsewhere = await mlxd("launch", "claude", "--url", url.replace("http:", "https:"))
    assert (ran.code, "--token-file" in ran.err) == (1, True)
    assert elsewhere.code == 4


def test_authorities_are_handed_on() -> None:
    """In the variable that each tool reads."""
    target = Target("https://h:1", "m", ("m",), "/ca.pem")
    variables = {name: agent.wire(target).variables for name, agent in AGENTS.items()}
    assert variables["codex"] == {"CODEX_CA_CERTIFICATE": "/ca.pem"}
    for name in ("claude", "opencode"):
        assert variables[name]["NODE_EXTRA_CA_CERTS"] == "/ca.pem"
