"""Downloads that are followed by questions: their end, what they refuse, and whom they leave alone.

What fetches is scripted here; over a hub on loopback see tests/controller/fleet/test_from_hub.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.pulling.asked import AskedDownloads
from mlxd_controller.pulling.downloads import Report
from mlxd_controller.pulling.wanted import Wanted, what_forbids
from mlxd_controller.runtime.ports import HubOrigin
from mlxd_shared.domain.errors import (
    ExtraMissing,
    HubUnavailable,
    InvalidModel,
    InvalidRequest,
    MlxdError,
    PullFailed,
    PullInterrupted,
    StoreFull,
)
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from tests.support.cli import LIMIT_S
from tests.support.made_stores import commit_of

DIGEST = "d" * 64
COMMIT = commit_of("1")
NAME, CONTENT = "config.json", b"{}"
HASH = hashlib.sha256(CONTENT).hexdigest()
ORIGIN = HubOrigin("o/m", COMMIT, ((NAME, HASH),))
HALF = PullProgress(PullPhase.DOWNLOADING, NAME, f"sha256:{HASH}", 1, 2, 1, 2)


class Scripted:
    """Fetches what a test says, once it may go on; counts what was begun, and what was given up."""

    def __init__(self, folder: Path, *, content: bytes = CONTENT) -> None:
        (folder / NAME).write_bytes(content)
        self.pulled = PulledModel("o/m", "o/m", COMMIT, COMMIT, str(folder), DIGEST, 1, 2)
        self.steps: tuple[PullProgress, ...] = (PullProgress(PullPhase.LISTING), HALF)
        self.error: MlxdError | None = None
        self.begun: list[Wanted] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, wanted: Wanted, report: Report) -> PulledModel:
        """Report the steps, and end as the test says."""
        self.begun.append(wanted)
        self.has_begun.set()
        for step in self.steps:
            report(step)
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        if self.error is not None:
            raise self.error
        return self.pulled


@pytest.fixture
def fetch(tmp_path: Path) -> Scripted:
    """One that brings the model that is wanted."""
    return Scripted(tmp_path)


@asynccontextmanager
async def provide(
    fetch: Callable[..., Any],
    cache: Path | None = Path("/cache"),
    *,
    environment: Mapping[str, str] | None = None,
    **limits: float,
) -> AsyncIterator[AskedDownloads]:
    """Provide downloads around the body."""
    downloads = AskedDownloads(lambda: cache, fetch, environment=environment or {}, **limits)
    try:
        yield downloads
    finally:
        await downloads.aclose()


async def ask_to_end(downloads: AskedDownloads) -> PullProgress:
    """Ask until the model is there."""
    while (step := await downloads.ask(DIGEST, ORIGIN)).pulled is None:
        pass
    return step


@pytest.mark.asyncio
async def test_a_download_is_told_as_it_is_and_then_its_end(fetch: Scripted) -> None:
    """Questions share it; it is of that commit, in the cache; a later question finds it again."""
    async with provide(fetch) as downloads:
        answers = await asyncio.gather(*(downloads.ask(DIGEST, ORIGIN) for _ in range(2)))
        assert answers == [HALF, HALF]
        fetch.may_end.set()
        assert (await ask_to_end(downloads)).pulled == fetch.pulled
        assert fetch.begun == [Wanted("o/m", COMMIT, Path("/cache"))]
        assert (await ask_to_end(downloads)).pulled == fetch.pulled
        assert len(fetch.begun) == 2


@pytest.mark.asyncio
async def test_a_download_that_nobody_asks_about_ends(fetch: Scripted) -> None:
    """Its asker is gone; whoever comes later has it go on."""
    async with provide(fetch, unasked_s=0.0) as downloads:
        assert (await downloads.ask(DIGEST, ORIGIN)).pulled is None
        await asyncio.wait_for(fetch.given_up.wait(), LIMIT_S)
        fetch.may_end.set()
        assert (await ask_to_end(downloads)).pulled == fetch.pulled


@pytest.mark.asyncio
async def test_a_download_that_is_left_ends_at_once(fetch: Scripted) -> None:
    """A question that waits just then is told; to leave what does not run is nothing."""
    async with provide(fetch) as downloads:
        await downloads.leave(DIGEST)
        asking = asyncio.create_task(downloads.ask(DIGEST, ORIGIN))
        await fetch.has_begun.wait()
        await downloads.leave(DIGEST)
        with pytest.raises(PullInterrupted, match="given up"):
            await asking
        await asyncio.wait_for(fetch.given_up.wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_no_download_outlives_its_owner(fetch: Scripted) -> None:
    """It has ended when `aclose` is done."""
    async with provide(fetch) as downloads:
        await downloads.ask(DIGEST, ORIGIN)
    assert fetch.given_up.is_set()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [HubUnavailable("away"), ExtraMissing("pulling", "hub")])
async def test_a_hub_that_cannot_be_asked_is_left_alone_for_a_while(
    error: MlxdError, fetch: Scripted
) -> None:
    """Loads of other models are refused at once, with the same reason; then it is asked again."""
    fetch.error = error
    fetch.may_end.set()
    async with provide(fetch) as downloads:
        for digest in (DIGEST, "e" * 64):
            with pytest.raises(type(error), match=str(error)[:4]):
                await downloads.ask(digest, ORIGIN)
        assert len(fetch.begun) == 1
    async with provide(fetch, away_s=0.0) as downloads:
        for _ in range(2):
            with pytest.raises(type(error)):
                await downloads.ask(DIGEST, ORIGIN)
        assert len(fetch.begun) == 3


@pytest.mark.asyncio
async def test_a_refusal_is_of_one_model(fetch: Scripted) -> None:
    """A full disk, or a gated model, says nothing of the next one."""
    fetch.error = StoreFull("full")
    fetch.may_end.set()
    async with provide(fetch) as downloads:
        for _ in range(2):
            with pytest.raises(StoreFull):
                await downloads.ask(DIGEST, ORIGIN)
    assert len(fetch.begun) == 2


@pytest.mark.asyncio
async def test_a_hub_has_so_long_to_list_files(fetch: Scripted) -> None:
    """Else whoever loads would wait for a network that swallows everything; one that has begun, or
    that waits for another download, is waited for."""
    for last in (PullProgress(PullPhase.WAITING), HALF):
        fetch.steps = (PullProgress(PullPhase.LISTING), last)
        async with provide(fetch, word_s=1e6) as downloads:
            assert await downloads.ask(DIGEST, ORIGIN) == last
    fetch.steps = (PullProgress(PullPhase.LISTING),)
    fetch.given_up.clear()
    async with provide(fetch, word_s=0.0) as downloads:
        with pytest.raises(HubUnavailable, match="no answer from the hub"):
            await downloads.ask(DIGEST, ORIGIN)


@pytest.mark.asyncio
async def test_a_file_that_is_announced_with_another_hash_is_not_fetched(fetch: Scripted) -> None:
    """A commit has one content, also at a mirror; the download is given up."""
    other = "0" * 64
    fetch.steps = (replace(HALF, file_digest=f"sha256:{other}"),)
    async with provide(fetch) as downloads:
        with pytest.raises(InvalidModel, match=f"hash {other}, not {HASH}") as caught:
            await downloads.ask(DIGEST, ORIGIN)
        assert caught.value.file == NAME
        await asyncio.wait_for(fetch.given_up.wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_another_kind_of_hash_announces_nothing(fetch: Scripted) -> None:
    """A hub may call a small file by git's hash that another calls by SHA-256: its bytes count."""
    fetch.steps = (replace(HALF, file_digest=f"git:{'0' * 40}"),)
    fetch.may_end.set()
    async with provide(fetch) as downloads:
        assert (await ask_to_end(downloads)).pulled == fetch.pulled


@pytest.mark.asyncio
async def test_what_came_is_compared_with_what_was_wanted(tmp_path: Path) -> None:
    """File by file, where a hub announces nothing; and by the digest of all."""
    fetch = Scripted(tmp_path, content=b"[]")
    fetch.steps = ()
    fetch.may_end.set()
    async with provide(fetch) as downloads:
        with pytest.raises(InvalidModel, match=f"not {HASH}") as caught:
            await downloads.ask(DIGEST, ORIGIN)
        assert caught.value.file == NAME
        for digest in ("e" * 64, ""):
            fetch.pulled = replace(fetch.pulled, digest=digest)
            with pytest.raises(InvalidModel, match=f"digest .*{digest or 'of no model'}, not"):
                await downloads.ask(DIGEST, replace(ORIGIN, contents=()))


@pytest.mark.asyncio
async def test_what_is_not_compared_yet_is_not_answered_with(tmp_path: Path) -> None:
    """A file of gigabytes takes its time; here one that cannot be opened before a writer has it."""
    fetch = Scripted(tmp_path)
    (tmp_path / NAME).unlink()
    os.mkfifo(tmp_path / NAME)
    fetch.may_end.set()
    async with provide(fetch) as downloads:
        early = await downloads.ask(DIGEST, ORIGIN)
        os.close(os.open(tmp_path / NAME, os.O_WRONLY))
        assert early.pulled is None
        with pytest.raises(PullFailed, match=NAME):  # what is no file has no length
            await ask_to_end(downloads)


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["1", "yes", "True", "on"])
async def test_a_machine_that_may_not_asks_no_hub(value: str, fetch: Scripted) -> None:
    """By the variable that the hub's own library reads; without a cache neither."""
    async with provide(fetch, environment={"HF_HUB_OFFLINE": value}) as downloads:
        with pytest.raises(HubUnavailable, match="HF_HUB_OFFLINE forbids"):
            await downloads.ask(DIGEST, ORIGIN)
    async with provide(fetch, None) as downloads:
        with pytest.raises(InvalidRequest, match="no cache"):
            await downloads.ask(DIGEST, ORIGIN)
    assert fetch.begun == []


@pytest.mark.asyncio
async def test_an_origin_leads_into_the_cache_alone(fetch: Scripted) -> None:
    """It names folders."""
    async with provide(fetch) as downloads:
        for repository in ("../m", "o/m/x", "/o", "o--m"):
            with pytest.raises(InvalidRequest, match="not ORG/NAME"):
                await downloads.ask(DIGEST, replace(ORIGIN, repository=repository))
    assert fetch.begun == []


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, ""),
        ({"HF_HUB_OFFLINE": "0"}, ""),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ({"TRANSFORMERS_OFFLINE": "true"}, "TRANSFORMERS_OFFLINE"),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, ""),
        ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE"),
    ],
)
def test_what_forbids_is_read_as_the_library_reads_it(
    environment: Mapping[str, str], variable: str
) -> None:
    """Of two variables the first one that says something counts."""
    assert what_forbids(environment) == variable
