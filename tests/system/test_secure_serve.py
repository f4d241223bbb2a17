"""`mlxd serve` with TLS, client certificates and a token, and `mlxd` commands that reach it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxd_shared.security import bearer
from tests.support.certificates import SECRET, Authority, token_file
from tests.support.cli import mlxd
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model


@pytest.mark.asyncio
async def test_the_command_line_reaches_a_protected_server(tmp_path: Path) -> None:
    """With the files, by option or environment, it works; without any one of them it does not."""
    authority = Authority(tmp_path)
    pair, own, token = authority.issue(), authority.issue("client"), token_file(tmp_path)
    wrong = token_file(tmp_path, SECRET + "x", name="wrong")
    model = write_tiny_model(tmp_path / "tiny")
    files = ("--tls-cert", f"{pair.cert}", "--tls-key", f"{pair.key}", "--token-file", f"{token}")
    extra = ("--tls-client-ca", f"{authority.path}", "--model", f"tiny={model}")
    async with serve(*files, *extra, address="localhost:0") as server:
        where = ("--address", server.address)
        tls = ("--tls-ca", f"{authority.path}", "--tls-cert", f"{own.cert}", "--tls-key",
               f"{own.key}")  # fmt: skip
        good, by_environment, wrong_token, no_tls, no_certificate = await asyncio.gather(
            mlxd(*where, *tls, "--token-file", f"{token}", "models"),
            mlxd(
                "generate", "tiny", "ab", "--max-tokens", "4", "--json",
                MLXD_ADDRESS=server.address, MLXD_TLS_CA=f"{authority.path}",
                MLXD_TLS_CERT=f"{own.cert}", MLXD_TLS_KEY=f"{own.key}", MLXD_TOKEN_FILE=f"{token}",
            ),
            mlxd(*where, *tls, "--token-file", f"{wrong}", "models"),
            mlxd(*where, "models"),
            mlxd(*where, *tls[:2], "--token-file", f"{token}", "models"),
        )  # fmt: skip
        log = server.log_path.read_text(encoding="utf-8")

    assert (good.code, good.rows[1][0]) == (0, "tiny"), good.err
    assert by_environment.code == 0, by_environment.err
    assert (wrong_token.code, bearer.REFUSAL in wrong_token.err) == (1, True)
    assert (no_tls.code, no_certificate.code) == (4, 4)
    assert SECRET not in log + wrong_token.err


@pytest.mark.asyncio
async def test_what_cannot_protect_stops_the_start(tmp_path: Path) -> None:
    """One line names the file or option, and nothing listens."""
    old = Authority(tmp_path).issue("old", days=-2)
    address = ("--address", "127.0.0.1:0", "--model", f"{write_tiny_model(tmp_path / 'tiny')}")
    refused = {
        "old.pem: the certificate has expired on 2": (
            "serve", *address, "--tls-cert", f"{old.cert}", "--tls-key", f"{old.key}"),
        "is not loopback": (
            "serve", *address, "--address", "0.0.0.0:0", "--token-file", f"{token_file(tmp_path)}"),
        "metrics: is HOST:PORT": ("serve", *address, "--metrics", "unix:/x"),
        "--tls-cert before the command": ("--tls-cert", f"{old.cert}", "serve", *address),
    }  # fmt: skip
    for problem, ran in zip(
        refused,
        await asyncio.gather(*(mlxd(*command) for command in refused.values())),
        strict=True,
    ):
        assert (ran.code, ran.out) == (2, ""), ran.err
        assert problem in ran.err.splitlines()[-1]
