"""The keeper: what workers say, shares that they are given, and folders that nobody has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from mlxd_controller.core.state import Model
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.prefixes.division import STEPS_OF_BUDGET
from mlxd_controller.prefixes.keeper import (
    FRESH_S,
    LIMITED_ROUNDS,
    WORDS_MIN,
    Keeper,
    open_keeper,
)
from mlxd_controller.runtime.changes import Changes
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.settings import DiskBudget
from mlxd_models.fit.planner import plan_load
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.listing import FORM_DIGITS
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, ShuttingDown
from mlxd_shared.domain.figures import PrefixDisk as PrefixDiskFigures
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.domain.requests import LoadSpec
from tests.fakes.workers import FakeLink, FakeProcess, LinkScript
from tests.shared.blocks.made_blocks import chain_of, files_in, open_blocks
from tests.support.cli import LIMIT_S
from tests.support.model_facts import device, facts

BUDGET = 1 << 20
STEP = BUDGET // STEPS_OF_BUDGET
FORM = "v1-" + FORM_DIGITS * "a"


class DiskLink(FakeLink):
    """A worker that keeps to the shares it is given, or does not."""

    def __init__(self) -> None:
        super().__init__(FakeProcess(1, "i"), LinkScript(), "d")
        self.shares: list[int] = []
        self.problem: MlxdError | None = None
        self.order = asyncio.Event()

    async def share_disk(self, nbytes: int, *, timeout_s: float) -> None:
        """Note the share."""
        self.shares.append(nbytes)
        self.order.set()
        if self.problem is not None:
            raise self.problem


@dataclass(slots=True)
class Kept:
    """A keeper with one worker."""

    keeper: Keeper
    worker: Worker
    link: DiskLink
    metrics: Metrics = field(default_factory=Metrics)

    def say(self, **changed: object) -> None:
        """Have the worker say of its folder what has changed."""
        before = self.worker.figures
        assert before is not None
        assert before.prefix_disk is not None
        now = replace(before.prefix_disk, **changed)  # type: ignore[arg-type]
        self.worker.note_figures(replace(before, prefix_disk=now), 0.0)

    async def share_out(self) -> None:
        """Do a round."""
        await self.keeper.share_out([self.worker], self.metrics)


@pytest_asyncio.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    """A keeper of an empty folder, and a worker that has nothing there yet."""
    keeper = open_keeper(DiskBudget(tmp_path / "prefixes", BUDGET))
    plan = plan_load(facts(10), LoadSpec(), device(1 << 14))
    link = DiskLink()
    worker = Worker(1, "d", "m", "/m", plan, "i", 0.0, link=link, ready_s=0.0)
    worker.note_figures(WorkerFigures(prefix_disk=PrefixDiskFigures(form=FORM)), 0.0)
    yield Kept(keeper, worker, link)
    keeper.close()


def fill(folder: Path, blocks: int, *, model: str = "old") -> int:
    """Leave blocks of a model that nobody has loaded; return their bytes."""
    store = open_blocks(folder)
    store.describe(About(model=model, digest=f"digest of {model}"))
    for block in chain_of(1, blocks):
        assert store.write(block)
    nbytes = store.nbytes
    store.close()
    return nbytes


@pytest.mark.asyncio
async def test_a_share_grows_with_what_is_used(kept: Kept) -> None:
    """A worker begins with a step, and gets one more only once it is about to need it."""
    await kept.share_out()
    assert kept.link.shares == [STEP]
    kept.say(budget_nbytes=STEP)
    await kept.share_out()
    assert kept.link.shares == [STEP]
    kept.say(nbytes=STEP - 1, blocks=1, least_worth=1.0)
    await kept.share_out()
    assert kept.link.shares == [STEP, 2 * STEP]


@pytest.mark.asyncio
async def test_an_old_word_gives_nothing_twice(kept: Kept) -> None:
    """What was ordered counts, though the worker's word is from before: no step is given again."""
    await kept.share_out()
    await kept.share_out()
    await kept.share_out()
    assert kept.link.shares == [STEP]


async def say_often(kept: Kept, **changed: object) -> None:
    """Have the worker say the same until the keeper believes that it knows of the last order."""
    for _ in range(WORDS_MIN):
        kept.say(**changed)
        await kept.share_out()


@pytest.mark.asyncio
async def test_a_full_disk_gives_its_room_back(kept: Kept) -> None:
    """A worker that may keep less than it was given, because its disk is full, has that for a share
    from then on, however much it evicts; after a while it is given a step to try again.
    """
    await kept.share_out()
    await say_often(kept, budget_nbytes=STEP // 2, nbytes=STEP // 2, blocks=1)
    assert kept.link.shares == [STEP, STEP // 2]
    for evicted in range(1, LIMITED_ROUNDS):
        kept.say(evicted=evicted)
        await kept.share_out()
    assert kept.link.shares == [STEP, STEP // 2]
    kept.say(evicted=LIMITED_ROUNDS)
    await kept.share_out()
    assert kept.link.shares == [STEP, STEP // 2, STEP // 2 + STEP]


@pytest.mark.asyncio
@pytest.mark.parametrize("age_s", [None, 0.0, FRESH_S + 0.1])
async def test_an_old_word_is_no_full_disk(kept: Kept, age_s: float | None) -> None:
    """The first words after an order may be from before it, and so is what an engine that stands
    still said last: no share is taken back for them.
    """
    await kept.share_out()
    for _ in range(WORDS_MIN if age_s else WORDS_MIN - 1):
        kept.say(budget_nbytes=0)
        assert kept.worker.figures is not None
        kept.worker.note_figures(replace(kept.worker.figures, age_s=age_s), 0.0)
        await kept.share_out()
        await kept.share_out()
    assert kept.link.shares == [STEP]


@pytest.mark.asyncio
async def test_an_order_that_fails_may_have_come_true(kept: Kept) -> None:
    """A worker that does not answer counts as if it had; the order is repeated until it does."""
    kept.link.problem = ShuttingDown()
    await kept.share_out()
    kept.link.problem = None
    await kept.share_out()
    await kept.share_out()
    assert kept.link.shares == [STEP, STEP]


@pytest.mark.asyncio
async def test_a_drop_that_is_cut_short_takes_no_share(kept: Kept) -> None:
    """Whoever asked for a drop may leave in the middle: the worker is given its share again."""
    await kept.share_out()
    kept.say(nbytes=77, blocks=2, budget_nbytes=STEP)
    kept.link.problem = ShuttingDown()
    with pytest.raises(ShuttingDown):
        await kept.keeper.drop(None, [kept.worker])
    kept.link.problem = None
    kept.say(nbytes=0, blocks=0, budget_nbytes=0)
    await kept.share_out()
    assert kept.link.shares == [STEP, 0, STEP]


@pytest.mark.asyncio
async def test_a_worker_that_is_being_stopped_keeps_its_share(kept: Kept, tmp_path: Path) -> None:
    """It still writes: what it may take is given to nobody else before it has ended."""
    folder = tmp_path / "prefixes"
    store = open_blocks(folder)
    (form,) = [path.name for path in folder.glob("v*")]
    before = Worker(2, "e", "b", "/b", kept.worker.plan, "j", 0.0, link=DiskLink(), ready_s=0.0)
    disk = PrefixDiskFigures(form=form, budget_nbytes=BUDGET)
    before.note_figures(WorkerFigures(prefix_disk=disk), 0.0)
    before.stopping = True
    await kept.keeper.share_out([before, kept.worker], kept.metrics)
    assert kept.link.shares == []
    store.close()
    await kept.share_out()
    assert kept.link.shares == [STEP]


@pytest.mark.asyncio
async def test_a_worker_has_its_share_once_it_is_ready(kept: Kept) -> None:
    """A model may be unloaded a moment after its load: its worker waits for no round."""
    changes, living = Changes(), list[Worker]()
    round_end, looks = asyncio.Event(), itertools.count()

    def workers() -> list[Worker]:
        if next(looks):  # the first round is over
            round_end.set()
        return living

    running = asyncio.create_task(kept.keeper.run(workers, kept.metrics, changes, poll_s=LIMIT_S))
    async with asyncio.timeout(LIMIT_S / 2):
        await round_end.wait()
        living.append(kept.worker)
        changes.publish(None, Model("d", "m", "/m", facts(10), keep_alive_s=0.0))
        await kept.link.order.wait()
    running.cancel()
    assert kept.link.shares == [STEP]


@pytest.mark.asyncio
async def test_a_word_that_changes_in_a_round_ends_nothing(kept: Kept) -> None:
    """A worker may say, while a round waits for the disk, that it keeps nothing any more."""
    figures = kept.worker.figures
    assert figures is not None
    sharing = asyncio.create_task(kept.share_out())
    await asyncio.sleep(0)
    kept.worker.note_figures(replace(figures, prefix_disk=None), 0.0)
    await sharing
    assert kept.link.shares == [STEP]
    await kept.share_out()
    assert kept.link.shares == [STEP]


@pytest.mark.asyncio
async def test_old_folders_make_room(kept: Kept, tmp_path: Path) -> None:
    """Blocks of a model that nobody has loaded go for what is used, and the folder with them."""
    folder = tmp_path / "prefixes"
    nbytes = fill(folder, 30)
    kept.keeper.budget = DiskBudget(folder, nbytes)
    await kept.share_out()
    assert kept.link.shares == []  # nothing is free yet
    for _ in range(3 * STEPS_OF_BUDGET):
        share = kept.link.shares[-1] if kept.link.shares else 0
        kept.say(nbytes=share, budget_nbytes=share, blocks=1, least_worth=1.0)
        await kept.share_out()
        assert share + sum(path.stat().st_size for path in files_in(folder)) <= nbytes
    assert files_in(folder) == []
    assert not list(folder.glob("v*"))
    assert kept.link.shares[-1] == nbytes


@pytest.mark.asyncio
async def test_what_another_process_has_is_left_alone(kept: Kept, tmp_path: Path) -> None:
    """A folder that a worker of somebody else has counts, and no file of it goes."""
    folder = tmp_path / "prefixes"
    nbytes = fill(folder, 8)
    kept.keeper.budget = DiskBudget(folder, nbytes)
    held = open_blocks(folder)
    await kept.share_out()
    assert len(files_in(folder)) == 8
    assert kept.link.shares == []
    held.close()


@pytest.mark.asyncio
async def test_accounts_say_whose_everything_is(kept: Kept, tmp_path: Path) -> None:
    """By model: those of workers by their word, others by their files."""
    nbytes = fill(tmp_path / "prefixes", 3)
    kept.say(nbytes=77, blocks=2)
    await kept.share_out()
    accounts = kept.keeper.accounts([kept.worker])
    assert [(one.about.model, one.nbytes, one.blocks, one.is_held) for one in accounts] == [
        ("m", 77, 2, True),
        ("old", nbytes, 3, False),
    ]


@pytest.mark.asyncio
async def test_dropping_one_model_leaves_others(kept: Kept, tmp_path: Path) -> None:
    """The worker's go by an order, and it goes on with its share; others' files stay."""
    folder = tmp_path / "prefixes"
    nbytes = fill(folder, 3)
    await kept.share_out()
    kept.say(nbytes=77, blocks=2, budget_nbytes=STEP)
    dropped = await kept.keeper.drop(frozenset({"d"}), [kept.worker])
    assert (dropped.blocks, dropped.nbytes) == (2, 77)
    assert kept.link.shares == [STEP, 0, STEP]
    assert len(files_in(folder)) == 3
    dropped = await kept.keeper.drop(frozenset({"digest of old"}), [kept.worker])
    assert (dropped.blocks, dropped.nbytes) == (3, nbytes)
    assert files_in(folder) == []
    assert len(kept.link.shares) == 3


@pytest.mark.asyncio
async def test_what_cannot_be_dropped_is_said(kept: Kept, tmp_path: Path) -> None:
    """Prompts that another process has stay: that is no success, and the rest is gone."""
    folder = tmp_path / "prefixes"
    fill(folder, 3)
    held = open_blocks(folder)
    with pytest.raises(InvalidRequest, match=r"a process has some of it.*old"):
        await kept.keeper.drop(None, [])
    assert len(files_in(folder)) == 3
    held.close()
    assert (await kept.keeper.drop(frozenset({"old"}), [])).blocks == 3


@pytest.mark.asyncio
async def test_verifying_finds_what_is_damaged(kept: Kept, tmp_path: Path) -> None:
    """A flipped bit, an empty file and a renamed one are removed and counted; the rest is sound."""
    folder = tmp_path / "prefixes"
    fill(folder, 5)
    first, second, *_ = files_in(folder)
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    second.rename(second.with_name(f"{'0' * 64}-0-entries.safetensors"))
    (findings,) = [findings async for findings in kept.keeper.verify()]
    assert (findings.sound, findings.unread) == (3, 0)
    assert sorted(findings.refused.values()) == [1, 1]
    assert findings.about.model == "old"
    assert len(files_in(folder)) == 3


@pytest.mark.asyncio
async def test_who_stops_reading_findings_holds_nobody_up(kept: Kept, tmp_path: Path) -> None:
    """Rounds, drops and other checks go on while somebody does not read on."""
    fill(tmp_path / "prefixes", 1)
    checking = kept.keeper.verify()
    assert (await anext(checking)).sound == 1
    await kept.share_out()
    assert [findings.sound async for findings in kept.keeper.verify()] == [1]
    assert (await kept.keeper.drop(None, [kept.worker])).blocks == 1
    await checking.aclose()


@pytest.mark.asyncio
async def test_what_workers_did_is_counted_once(kept: Kept) -> None:
    """Counters grow by what is new, also after a worker's counts have begun anew."""
    kept.say(written=3, written_nbytes=30, hit_tokens=256)
    await kept.share_out()
    await kept.share_out()
    kept.say(written=4, written_nbytes=40, read=1, read_nbytes=10)
    await kept.share_out()
    blocks = kept.metrics.prefix_disk_blocks.points
    assert {dict(key)["event"]: value for key, value in blocks.items()} == {
        "written": 4.0, "read": 1.0, "evicted": 0.0, "refused": 0.0
    }  # fmt: skip
    assert set(kept.metrics.prefix_disk_bytes.points.values()) == {40.0, 10.0}
    assert set(kept.metrics.prefix_disk_hit_tokens.points.values()) == {256.0}


def test_a_folder_has_one_keeper(tmp_path: Path) -> None:
    """A second one is refused and told which folder; once the first has gone it may."""
    budget = DiskBudget(tmp_path / "prefixes", BUDGET)
    first = open_keeper(budget)
    with pytest.raises(InvalidRequest, match="another server has it"):
        open_keeper(budget)
    first.close()
    open_keeper(budget).close()


@pytest.mark.asyncio
async def test_a_folder_that_others_see_is_refused(tmp_path: Path) -> None:
    """Prompts can be read from it: one that is open to others is not used, and not changed."""
    folder = tmp_path / "prefixes"
    await asyncio.to_thread(folder.mkdir, mode=0o755)
    with pytest.raises(InvalidRequest, match="0700"):
        open_keeper(DiskBudget(folder, BUDGET))
    assert folder.stat().st_mode & 0o777 == 0o755
