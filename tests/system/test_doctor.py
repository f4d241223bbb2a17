"""`mlxd doctor` on this machine, and what a server makes of its findings."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from mlxd import Client
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_shared.ops.findings import FINDINGS_FILE, Proved, remember, versions_of
from mlxd_worker.machine.device_name import device_name
from tests.support.cli import mlxd
from tests.support.engine_threads import kind
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model

PLATFORM = sys.platform


@pytest.mark.asyncio
async def test_a_quick_look_finds_what_was_planted(tmp_path: Path) -> None:
    """A token that all can read and a tokenizer that is none; the engine itself is sound."""
    models = tmp_path / "models"
    broken = write_tiny_model(models / "broken")
    (broken / "tokenizer.json").write_text("{")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    where = ("--address", f"unix:{tmp_path}/s", "--token-file", str(token))
    ran = await mlxd("doctor", "--quick", "--json", *where, MLXD_MODELS_DIR=str(models))

    (report,) = ran.objects
    faults = [f for f in report["findings"] if f["state"] == "fault" and f["check"] != "port"]
    assert ran.code == 1, ran.err
    assert [fault["check"] for fault in faults] == ["secrets", "tokenizer"]
    assert str(token) in faults[0]["text"]
    assert str(broken) in faults[1]["text"]
    assert report["proved"]["device"] == device_name(kind())
    assert report["proved"]["off"] == {}
    assert {line["subject"] for line in report["engine"] if "fast path" in line["check"]} == {
        "LlamaForCausalLM"
    }
    assert not (models / FINDINGS_FILE).exists()


@pytest.mark.asyncio
async def test_without_the_engine_a_look_is_a_table(tmp_path: Path) -> None:
    """Nothing is proved, and nothing remembered."""
    ran = await mlxd("doctor", "--no-engine", "--address", f"unix:{tmp_path}/s")

    assert ran.rows[0] == ["CHECK", "STATE", "WHAT"]
    assert ["backend", "fine"] in [row[:2] for row in ran.rows]
    assert "fast path" not in ran.out


@pytest.mark.asyncio
async def test_secrets_that_a_configuration_names_are_looked_at(tmp_path: Path) -> None:
    """Those of the server that it is for, not only the caller's."""
    for name in ("keys", "tls"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o644)
    path = tmp_path / "c.toml"
    path.write_text('[server]\nkeys_file = "keys"\ntls_key = "tls"\n')
    where = ("--address", f"unix:{tmp_path}/s")
    ran = await mlxd("doctor", "--no-engine", "--json", *where, MLXD_CONFIG=str(path))

    (report,) = ran.objects
    faults = [each["text"] for each in report["findings"] if each["check"] == "secrets"]
    assert ran.code == 1, ran.err
    assert faults == [
        f"{name} {tmp_path / file} is open to others (644): chmod 600"
        for name, file in (("keys file", "keys"), ("server's private key", "tls"))
    ]


@pytest.mark.asyncio
async def test_a_worker_says_what_is_switched_off(tmp_path: Path) -> None:
    """In its status and in the log, from the findings beside the server's models."""
    write_tiny_model(tmp_path / "m")
    backend = choose_backend(installed_versions(), platform=PLATFORM)
    off = {FastPath.LANES: "slower here"}
    remember(tmp_path, Proved(device_name(kind()), versions_of(backend), off))
    places = {"MLXD_MODELS_DIR": str(tmp_path)}
    async with serve(environment=places) as server, Client(server.address) as client:
        async with client.load("m") as updates:
            async for _ in updates:
                pass
        (worker,) = (await client.status()).workers
        shown = await asyncio.wait_for(mlxd("--address", server.address, "status"), 60)
        logged = server.find_logged("a fast path is off")

    assert worker.fast_paths_off == ("lanes: slower here",)
    assert ["switched off", "lanes: slower here"] in shown.rows
    assert (logged["path"], logged["reason"]) == ("lanes", "slower here")
