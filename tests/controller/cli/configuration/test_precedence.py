"""`mlxd` with a configuration file: flags, variables, the file and defaults, and who says what."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd import Client
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd
from tests.support.served import serve

NOWHERE = "127.0.0.1:1"


def write(tmp_path: Path, text: str) -> str:
    """Write a file and return its path."""
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.asyncio
async def test_the_nearest_address_wins(tmp_path: Path) -> None:
    """A flag, then the variable, then the file."""
    async with serving(Answers()) as fake:
        good = write(tmp_path, f'address = "{fake.address}"')
        named = await mlxd("ps", MLXD_CONFIG=good)
        bad = write(tmp_path, f'address = "{NOWHERE}"')
        variable = await mlxd("ps", MLXD_CONFIG=bad, MLXD_ADDRESS=fake.address)
        flag = await mlxd("ps", "--address", fake.address, MLXD_CONFIG=bad, MLXD_ADDRESS=NOWHERE)
        nowhere = await mlxd("ps", MLXD_CONFIG=bad)
    assert [named.code, variable.code, flag.code, nowhere.code] == [0, 0, 0, 4]


@pytest.mark.asyncio
async def test_show_names_who_says_each_value(tmp_path: Path) -> None:
    """Default, file, variable, flag; a store's own variable too."""
    path = write(
        tmp_path,
        '[limits]\nkeep_alive = "9m"\nwaiting_max = 7\n[models.m]\npin = true\n'
        '[stores]\nmodels_dir = "m"\n',
    )
    shown = await mlxd(
        "--address", NOWHERE, "config", "show", "--json",
        MLXD_CONFIG=path, MLXD_WAITING_MAX="8", MLXD_HUB_CACHE="", MLXD_MODELS_DIR="", HF_HOME="/h",
        HF_HUB_CACHE="", HUGGINGFACE_HUB_CACHE="",
    )  # fmt: skip
    said = {each["key"]: (each["value"], each["source"]) for each in shown.objects}
    assert said["address"] == (NOWHERE, "flag --address")
    assert said["limits.waiting_max"] == ("8", "variable MLXD_WAITING_MAX")
    assert said["limits.keep_alive"] == ("9m", f"file {path}")
    assert said["limits.load_timeout"] == ("5m00s", "default")
    assert said["stores.models_dir"] == (str(tmp_path / "m"), f"file {path}")
    assert said["stores.hub_cache"] == ("/h/hub", "variable HF_HOME")
    assert said["stores.ollama_models"] == ("none", "variable MLXD_OLLAMA_MODELS")
    assert said['models."m".pin'] == ("true", f"file {path}")
    table = await mlxd("config", "show", MLXD_CONFIG=path)
    assert table.rows[0] == ["KEY", "VALUE", "FROM"]
    assert ["limits.waiting_max", "7", f"file {path}"] in table.rows


@pytest.mark.asyncio
async def test_a_file_that_is_refused_stops_what_would_use_it(tmp_path: Path) -> None:
    """With 2, the file and the key; its path, the version and a doctor are there all the same."""
    path = write(tmp_path, "adress = 'x:1'")
    ps, shown = await mlxd("ps", MLXD_CONFIG=path), await mlxd("config", "show", MLXD_CONFIG=path)
    for ran in (ps, shown):
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"mlxd: {path}: adress: there is no such key")
    where, version = (
        await mlxd("config", "path", MLXD_CONFIG=path),
        await mlxd("version", MLXD_CONFIG=path),
    )
    assert (where.code, where.out) == (0, f"{path}\n")
    assert version.code == 0
    assert (await mlxd("config", "path")).out == "none\n"
    doctor = await mlxd("doctor", "--no-engine", "--json", MLXD_CONFIG=path, MLXD_ADDRESS=NOWHERE)
    (report,) = doctor.objects
    assert doctor.code == 1
    assert report["findings"][0]["text"].startswith(f"{path}: adress: there is no such key")


@pytest.mark.asyncio
async def test_a_server_is_as_its_file_says(tmp_path: Path) -> None:
    """Options, lists and switches from the file, and a flag before one of them."""
    path = write(
        tmp_path,
        '[server]\npreload = ["demo"]\n[limits]\nmax_loaded = 3\nkeep_alive = "7m"\n'
        '[models."demo"]\ncontext = 96\ntemperature = 0.125\nkeep_alive = "1h"\n',
    )
    environment = {"MLXD_CONFIG": path, "MLXD_MAX_LOADED": "2"}
    async with serve(environment=environment) as server, Client(server.address) as client:
        async with client.load("demo") as updates:
            async for update in updates:
                loaded = update.model
        assert loaded.context_length == 96
        assert loaded.effective_sampling.temperature == 0.125
        assert loaded.expire_time is not None
        assert loaded.last_used_time is not None
        assert (loaded.expire_time - loaded.last_used_time).total_seconds() > 7 * 60
        await client.unload("demo")
        assert (await client.fit("demo")).context_length == 96


@pytest.mark.asyncio
async def test_a_server_refuses_what_a_model_cannot_have(tmp_path: Path) -> None:
    """Out of range by file and key; beyond the model, by the model; two names of one too."""
    for text, problem in (
        ("[models.demo]\ncontext = 3", f'{tmp_path}/c.toml: models."demo".context: 3 is outside'),
        ("[models.demo]\ntop_p = 2", f'{tmp_path}/c.toml: models."demo".top_p: 2.0 is outside'),
        ("[models.demo]\ncontext = 999999", 'models."demo": options.context_length: 999999 is'),
        ("[models.demo]\nlogit_bias = ['3']", "logit_bias: "),
        ("[models.m]\npath = 'no'", f'models."m".path: {tmp_path}/no is not a folder'),
    ):
        path = write(tmp_path, text)
        ran = await mlxd("serve", "--address", "127.0.0.1:0", MLXD_CONFIG=path)
        assert (ran.code, problem in ran.err) == (2, True), ran.err
