"""`mlxd show`: what the server says of a model, and what its files say where they are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd_controller.cli.commands.models.details import read_facts, read_licence
from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_source import files_of
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd
from tests.support.terminal import SMALL, USUAL, XTERM, on_terminal
from tests.support.tiny_model import HIDDEN, write_tiny_model

DEMO = Path(__file__).parents[5] / "shared" / "mlxd_shared" / "demo_model"


@pytest.mark.asyncio
async def test_a_model_is_shown_with_what_its_files_say(tmp_path: Path) -> None:
    """Parameters, packing, context, template, licence, digest, path, and the defaults."""
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "README.md").write_text('---\ntags: [a]\nlicense: "apache-2.0"  # yes\n---\n# Tiny\n')
    known = replies.model()
    known.path, known.digest, known.has_chat_template = str(folder), model_digest(folder), True
    known.has_vision = True
    async with serving(Answers(models=[known])) as fake:
        where = ("--address", fake.address)
        ran, named = await mlxd("show", "demo", *where), await mlxd("show", "x", "--json", *where)
        wide = await mlxd("show", "demo", "-o", "json", *where)
    lines = {line[:15].strip(): line[15:].strip() for line in ran.out.splitlines()}

    assert (ran.code, ran.err) == (0, "")
    assert lines["name"] == "demo, tiny"
    assert int(lines["parameters"]) > HIDDEN * HIDDEN
    assert lines["quantization"] == "none, stored as F32"
    assert lines["licence"] == "apache-2.0"
    assert lines["context"] == "1024 tokens, 512 in force"
    assert lines["chat template"] == "yes"
    assert lines["images"] == "seen in chats"
    assert "temperature 0.5, top_k 40" in lines["defaults"]
    assert (lines["digest"], lines["path"]) == (known.digest, str(folder))
    assert named.out == wide.out
    (shown,) = named.objects
    assert shown["files"]["parameters"] == int(lines["parameters"])
    assert shown["state"] == "ready"
    assert shown["has_vision"] is True


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [USUAL, SMALL])
async def test_it_fits_a_terminal(size: tuple[int, int]) -> None:
    """No word but a path or a digest is broken."""
    async with serving(Answers(models=[replies.model()])) as fake:
        show = on_terminal("show", "demo", "--address", fake.address, term=XTERM, size=size)
        async with show as terminal:
            assert await terminal.wait_ended() == 0
            whole = [line for line in terminal.screen.splitlines() if replies.DIGEST not in line]
    assert max(map(len, whole)) <= size[0]


@pytest.mark.asyncio
async def test_of_another_s_files_nothing_is_said() -> None:
    """Where the server's path is none here, or another model's."""
    async with serving(Answers(models=[replies.model()])) as fake:
        ran = await mlxd("show", "demo", "--address", fake.address)
    assert (ran.code, "parameters" in ran.out, "images" in ran.out) == (0, False, False)
    assert read_facts(DEMO, "sha256:other") is None
    facts = read_facts(DEMO, model_digest(DEMO))
    assert facts is not None
    assert facts.parameters > 1_000_000


def test_a_packing_is_described(tmp_path: Path) -> None:
    """As the config and the headers have it."""
    facts = read_facts(DEMO, model_digest(DEMO))
    config = json.loads((DEMO / "config.json").read_text())
    packing = config.get("quantization")
    assert facts is not None
    if packing is None:
        assert facts.quantization.startswith("none")
    else:
        assert f"{packing['bits']} bits in groups of {packing['group_size']}" in facts.quantization


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({}, ""), ({"README.md": "license: mit"}, ""),
        ({"README.md": "---\r\nlicense: mit\r\n---\r\n"}, "mit"),
        ({"README.md": "---\nx: 1\n---\nlicense: mit", "LICENSE": "\n  MIT License\nmore"},
         "MIT License"),
        ({"README.md": "---\nlicense:\n- mit\n---\n", "LICENSE.txt": "\xff"}, "\ufffd"),
    ],
)  # fmt: skip
def test_a_licence_is_that_of_the_card_or_of_its_file(
    tmp_path: Path, files: dict[str, str], licence: str
) -> None:
    """Front matter alone counts; what says nothing is passed over."""
    folder = write_tiny_model(tmp_path / "m")
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    assert read_licence(files_of(folder)) == licence


def test_of_files_that_cannot_be_read_nothing_is_said(tmp_path: Path) -> None:
    """The card too: a folder in its place is no traceback."""
    folder = write_tiny_model(tmp_path / "m")
    digest = model_digest(folder)
    assert read_facts(folder, digest) is not None
    (folder / "README.md").mkdir()
    assert read_facts(folder, digest) is None
