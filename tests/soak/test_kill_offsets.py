"""A worker that is killed at any token: its clients do not notice, or are told honestly."""

from __future__ import annotations

import signal
import statistics

import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import WorkerLost
from tests.real_inputs import real_input
from tests.support.calls import error_of
from tests.support.killed_streams import Killed, hear
from tests.support.single_token_worker import CHUNK_VARIABLE
from tests.support.struck import Struck, struck_controller
from tests.support.trained import DEMO, MODELS

OFFSETS = range(65)
SOME = range(0, 65, 8)
STREAMS_A_TIE = 500
"""At most one in so many streams may differ by a tie."""
GAP_MAX_S = 2.0


async def forget(struck: Struck, index: int) -> None:
    """Every other time, have the controller forget that workers have failed."""
    if index % 2:
        await struck.unload()


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
async def test_streams_go_on_from_every_kill_offset(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy, drawn, with stop strings and with a schema: ids, text and end as undisturbed."""
    folder = DEMO if name == "demo" else real_input("models", name)
    async with struck_controller(folder) as struck:
        killed = Killed(folder, struck)
        await killed.begin()
        for index, offset in enumerate(OFFSETS):
            await killed.kill(offset, killed.cases)
            await forget(struck, index)
    gaps_s = killed.gaps_s
    with capsys.disabled():
        print(  # noqa: T201 - the figures of docs/evidence
            f"\n{name}: {killed.streams} streams, ties {killed.ties}, gaps: median "
            f"{statistics.median(gaps_s):.2f} s, max {max(gaps_s):.2f} s"
        )
    assert killed.streams == len(OFFSETS) * 4
    assert len(killed.ties) <= max(1, killed.streams // STREAMS_A_TIE)
    assert statistics.median(gaps_s) < GAP_MAX_S


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
async def test_no_tie_where_a_replay_goes_through_the_same_passes() -> None:
    """Chunks of one token, nothing guessed, one stream at a time: not one token differs."""
    async with struck_controller(DEMO, environment={CHUNK_VARIABLE: "1"}) as struck:
        plain = inference_pb2.SpeculationOptions(depth_max=0)
        killed = Killed(DEMO, struck, speculation=plain)
        await killed.begin("greedy", "drawn")
        for offset in OFFSETS:
            for case in killed.cases:
                await killed.kill(offset, [case])
            await struck.unload()
    assert killed.streams == len(OFFSETS) * 2
    assert not killed.ties


@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_a_worker_that_is_told_to_go_hands_its_streams_on() -> None:
    """SIGTERM: what it still says is lost here, and said by the next one."""
    async with struck_controller(DEMO) as struck:
        killed = Killed(DEMO, struck)
        await killed.begin("greedy", "drawn")
        for index, offset in enumerate(SOME):
            await killed.kill(offset, killed.cases, number=signal.SIGTERM)
            await forget(struck, index)
    assert len(killed.ties) <= 1


@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_a_stream_that_may_not_move_is_lost_honestly() -> None:
    """With migrate=false the error tells how far it came; nothing before that is wrong."""
    async with struck_controller(DEMO) as struck:
        killed = Killed(DEMO, struck)
        await killed.begin("greedy")
        (case,), whole = killed.cases, killed.whole["greedy"]
        for index, offset in enumerate(SOME):
            struck.strike(offset)
            call = struck.inference.Generate(case.request(migrate=False))
            ids: list[int] = []
            messages = aiter(call)
            while len(ids) < offset:
                ids += (await anext(messages)).token_ids
            error = await error_of(call)
            assert isinstance(error, WorkerLost)
            assert (error.offset, error.cause) == (offset, "signal 9")
            assert ids == whole.ids[:offset]
            assert (await hear(struck, case.request())).ids == whole.ids
            await forget(struck, index)
