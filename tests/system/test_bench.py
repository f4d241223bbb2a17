"""`mlxd bench` on a tiny model: each way and size has figures, and nothing private is shared."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from mlxd_controller.store.shelves import demo_model
from mlxd_models.files.digest import model_digest
from tests.support.cli import mlxd
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model

SIZES = ("--prompt", "8,40", "--rows", "1,2", "--tokens", "6", "--runs", "1", "--no-peer")
CELLS = [(8, 1), (8, 2), (40, 1), (40, 2)]


@pytest.mark.asyncio
async def test_an_engine_alone_and_served(tmp_path: Path) -> None:
    """By a server of its own; figures of every size, and a file that names no place."""
    folder = write_tiny_model(tmp_path / "secret-name")
    out = tmp_path / "report.json"
    ran = await mlxd("bench", str(folder), *SIZES, "--json", "--out", str(out))

    (report,) = ran.objects
    assert ran.code == 0, ran.err
    measured = [(f["way"], f["prompt_tokens"], f["rows"]) for f in report["figures"]]
    assert measured == [(way, *cell) for way in ("engine", "served") for cell in CELLS]
    for figure in report["figures"]:
        assert figure["peak_nbytes"] > 0
        assert min(figure["values"].values()) >= 0
        assert figure["values"]["prefill_tokens_per_s"] > 0
    text = out.read_text()
    assert json.loads(text) == report
    assert report["model"]["digest"] == model_digest(folder)
    assert not any(word in text for word in ("secret-name", str(tmp_path), platform.node()))


@pytest.mark.asyncio
async def test_a_server_that_runs(tmp_path: Path) -> None:
    """It loads the model, which it keeps; a table has a row for each size and way."""
    folder = write_tiny_model(tmp_path / "m")
    async with serve("--model", f"m={folder}") as server:
        where = ("--address", server.address)
        ran = await mlxd("bench", str(folder), *SIZES, "--server", *where)
        listed = await mlxd("ps", *where)

    assert ran.code == 0, ran.err
    assert [row[:3] for row in ran.rows[1:]] == [
        [way, str(prompt), str(rows)] for way in ("engine", "served") for prompt, rows in CELLS
    ]
    assert listed.rows[1][0] == "m"


@pytest.mark.asyncio
async def test_a_model_of_the_configuration_file_in_a_form_of_its_own(tmp_path: Path) -> None:
    """By the file's name for it; the report says which form was measured."""
    path = tmp_path / "c.toml"
    path.write_text(f'[models.m]\npath = "{demo_model()}"\n')
    sizes = ("--prompt", "8", "--tokens", "4", "--runs", "1", "--no-peer")
    ran = await mlxd(
        "bench", "m", *sizes, "--weights", "mixed_4_8", "--json", MLXD_CONFIG=str(path)
    )

    (report,) = ran.objects
    assert report["model"]["weights"] == "mixed_4_8", ran.err
    assert [figure["way"] for figure in report["figures"]] == ["engine", "served"]


@pytest.mark.asyncio
async def test_what_cannot_be_measured_is_said_in_a_line(tmp_path: Path) -> None:
    """A model that is none, sizes that are none, a context that the model has not."""
    folder = write_tiny_model(tmp_path / "m", context_max=64)
    absent = await mlxd("bench", "no-such-model")
    wrong = await mlxd("bench", str(folder), "--prompt", "x")
    long = await mlxd("bench", str(folder), "--prompt", "100", "--no-peer")

    assert (absent.code, wrong.code, long.code) == (3, 2, 1)
    assert "--prompt" in wrong.err
    assert "64" in long.err
    assert all(len(ran.err.splitlines()) == 1 for ran in (absent, wrong, long))
