"""One download in a process of its own, from a hub on loopback: heard, refused, ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from mlxd_controller.launcher.child import Pipe, start
from mlxd_controller.pulling import talk
from mlxd_controller.pulling.process import COMMAND, MODULE, fetch, hide_secrets
from mlxd_controller.pulling.wanted import Wanted
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import (
    ExtraMissing,
    FieldViolation,
    HubDenied,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
    PullInterrupted,
    StoreFull,
)
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from tests.support.cli import LIMIT_S
from tests.support.hub_server import FakeHub, Repository, serving
from tests.support.made_stores import commit_of
from tests.support.tiny_model import write_tiny_model

COMMIT = commit_of("1")
WEIGHTS = "model.safetensors"
PART_NBYTES = 10 << 20
"""Which the library reads and counts before it writes it: of two that are told, one is there."""
HELD_NBYTES = 2 * PART_NBYTES + 100


@pytest.fixture(name="hub")
def hub_with_models(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has a tiny model, one that is gated, and one whose weights stop coming."""
    folder = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    large = files | {WEIGHTS: random.Random(1).randbytes(3 * PART_NBYTES)}
    repositories = {
        "o/m": Repository(COMMIT, files),
        "o/gated": Repository(COMMIT, files, refusal=(401, "GatedRepo")),
        "o/large": Repository(COMMIT, large),
    }
    with serving(FakeHub(repositories)) as served:
        yield served


def environment_of(hub: FakeHub) -> Mapping[str, str]:
    """Return the environment of who pulls from this hub."""
    return {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}


def processes() -> list[psutil.Process]:
    """Return the downloads that are children of this process."""
    downloads = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if MODULE in child.cmdline():
                downloads.append(child)
    return downloads


@pytest.mark.asyncio
async def test_a_process_downloads_and_says_how_far_it_is(hub: FakeHub, tmp_path: Path) -> None:
    """What it brings is what a pull here would; of each file at least its end is told."""
    steps: list[PullProgress] = []
    wanted = Wanted("o/m", "main", tmp_path / "hub")
    pulled = await fetch(wanted, steps.append, environment=environment_of(hub))

    assert (pulled.name, pulled.commit) == ("o/m", COMMIT)
    assert pulled.digest == model_digest(tmp_path / "tiny")
    assert steps[0].phase is PullPhase.LISTING
    ends = {step.file for step in steps if step.file_done_nbytes == step.file_size_nbytes > 0}
    assert ends == set(hub.repositories["o/m"].files)
    assert processes() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "kind"), [("o/gated", HubDenied), ("o/none", ModelNotFound)])
async def test_a_refusal_comes_back_as_its_class(
    name: str, kind: type[MlxdError], hub: FakeHub, tmp_path: Path
) -> None:
    """From the other process as from this one."""
    with pytest.raises(kind, match=name):
        await fetch(
            Wanted(name, "main", tmp_path / "hub"),
            lambda _: None,
            environment=environment_of(hub),
        )


@pytest.mark.asyncio
async def test_without_the_extra_its_name_is_said(hub: FakeHub, tmp_path: Path) -> None:
    """Not a traceback, and not before somebody pulls."""
    hide = "import sys\nsys.modules['huggingface_hub'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hide, encoding="utf-8")
    environment = {**environment_of(hub), "PYTHONPATH": str(tmp_path)}
    with pytest.raises(ExtraMissing, match=r"mlxd\[hub\]"):
        await fetch(
            Wanted("o/m", "main", tmp_path / "hub"), lambda _: None, environment=environment
        )


@pytest.mark.asyncio
async def test_a_cancelled_download_ends_and_the_next_resumes(hub: FakeHub, tmp_path: Path) -> None:
    """Its process is gone when the task is; what has arrived is not asked for again."""
    hub.hold_at[WEIGHTS] = HELD_NBYTES
    wanted = Wanted("o/large", "main", tmp_path / "hub")
    arrived = asyncio.Event()

    def report(step: PullProgress) -> None:
        if step.file == WEIGHTS and step.file_done_nbytes == 2 * PART_NBYTES:
            arrived.set()

    fetching = asyncio.create_task(fetch(wanted, report, environment=environment_of(hub)))
    await asyncio.wait_for(arrived.wait(), LIMIT_S)
    (process,) = processes()
    assert process.nice() > 0
    leftover = wanted.folder / "blobs" / f"{64 * 'a'}.0123abcd.incomplete"
    leftover.touch()  # as the library leaves one of Xet's
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not process.is_running()
    assert not leftover.exists()

    hub.hold_at.clear()
    pulled = await fetch(wanted, lambda _: None, environment=environment_of(hub))
    first, second = hub.begins_of(WEIGHTS)
    assert first == 0
    assert PART_NBYTES <= second <= 2 * PART_NBYTES
    assert pulled.commit == COMMIT, "the hash of each file was right"


@pytest.mark.asyncio
async def test_a_bug_of_the_process_is_in_the_log(hub: FakeHub, tmp_path: Path) -> None:
    """Its traceback; the caller is told to try again, and no more."""
    broken = "raise ZeroDivisionError('a bug')\n"
    (tmp_path / "huggingface_hub.py").write_text(broken, encoding="utf-8")
    environment = {**environment_of(hub), "PYTHONPATH": str(tmp_path)}
    wanted = Wanted("o/m", "main", tmp_path / "hub")
    with capture_logs() as log, pytest.raises(PullInterrupted, match="pull again"):
        await fetch(wanted, lambda _: None, environment=environment)
    assert any("ZeroDivisionError" in entry.get("line", "") for entry in log)
    (end,) = (entry for entry in log if "code" in entry)
    assert (end["model"], end["code"]) == ("o/m", 1)


@pytest.mark.asyncio
async def test_a_process_that_dies_is_an_error(hub: FakeHub, tmp_path: Path) -> None:
    """One that says to try again, as what has arrived is kept."""
    hub.hold_at[WEIGHTS] = HELD_NBYTES
    arrived = asyncio.Event()

    def report(step: PullProgress) -> None:
        if step.file == WEIGHTS:
            arrived.set()

    wanted = Wanted("o/large", "main", tmp_path / "hub")
    fetching = asyncio.create_task(fetch(wanted, report, environment=environment_of(hub)))
    await asyncio.wait_for(arrived.wait(), LIMIT_S)
    (process,) = processes()
    process.kill()
    with pytest.raises(PullInterrupted, match="pull again"):
        await fetching


@pytest.mark.asyncio
async def test_a_process_ends_with_its_controller(hub: FakeHub, tmp_path: Path) -> None:
    """Whose end of a pipe closes however it ends; the hub says nothing more at that moment."""
    hub.hold_at[WEIGHTS] = 1
    wanted = Wanted("o/large", "main", tmp_path / "hub")
    with ExitStack() as held:
        steps, life = (held.enter_context(closing(Pipe(*os.pipe()))) for _ in range(2))
        reader = await steps.reader()
        child = await start(
            (*COMMAND, talk.write_order(wanted), str(steps.write_fd), str(life.read_fd)),
            output=steps.write_fd,
            pass_fds=(steps.write_fd, life.read_fd),
            environment=environment_of(hub),
        )
        steps.close(steps.write_fd)
        life.close(life.read_fd)
        while WEIGHTS.encode() not in await asyncio.wait_for(reader.stream.readline(), LIMIT_S):
            pass
        life.close(life.write_fd)
        assert await asyncio.wait_for(child.wait(), LIMIT_S) == 1
        reader.close()


def test_what_processes_say_to_each_other_comes_back() -> None:
    """Orders, steps, results and errors with their fields, each in one line."""
    wanted = Wanted("o/m", "v1", Path("/c"), ("*.md", "ä"))
    assert talk.read_order(talk.write_order(wanted)) == wanted
    step = PullProgress(PullPhase.VERIFYING, "a\n", "sha256:1", 1, 2, 3, 4)
    pulled = PulledModel("o/m", "o/m", "main", "c", "/p", "d", 1, 2)
    violation = FieldViolation("include", "matches a.bin")
    said: list[tuple[bytes, object]] = [
        (talk.write_step(step), step),
        (talk.write_pulled(pulled), pulled),
    ]
    for line, value in said:
        assert talk.read_line(line) == value
    for error in (InvalidRequest((violation,)), StoreFull("full")):
        line = talk.write_error(error)
        back = talk.read_line(line)
        assert (type(back), vars(back)) == (type(error), vars(error))
        assert line.count(b"\n") == 1
    assert json.loads(talk.write_step(step))["step"]["phase"] == "verifying"


LINES = [
    (
        "Error while downloading from https://a.b/c/d.e?Signature=x%2Fy~&Key-Pair-Id=1: cut off",
        "Error while downloading from https://a.b/c/d.e… cut off",
    ),
    ("GET 'https://a.b/?X-Amz-Signature=1' failed", "GET 'https://a.b/…' failed"),
    ("Bearer hf_AbCdEf123 was refused", "Bearer … was refused"),
    ("What now? Try again. hf_xet is missing?", "What now? Try again. hf_xet is missing?"),
]


@pytest.mark.parametrize(("line", "logged"), LINES)
def test_what_opens_files_is_not_logged(line: str, logged: str) -> None:
    """A signed URL or a token would serve whoever reads the log."""
    assert hide_secrets(line) == logged
