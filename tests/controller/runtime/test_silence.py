"""A worker that lives and answers nothing is ended, and only such a one."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from mlxd_controller.runtime.silence import ENGINE_PATIENCE, ROUND_MAX_S, Silence
from mlxd_controller.runtime.worker import ENGINE_STILL_S, Worker
from mlxd_models.fit.planner import plan_load
from mlxd_shared import config
from mlxd_shared.domain.errors import InternalError, MlxdError, WorkerLost
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.wire.records import duration_to_pb
from mlxd_shared.wire.status import RemoteError
from tests.fakes.world import FakeClock
from tests.support.controller_stack import Stack, controller_stack, request
from tests.support.model_facts import device, facts

LIMIT_S = 20.0
POLL_S = 0.01
HEARD_S_MAX = 60.0


def a_worker(**options: object) -> Worker:
    """Return one that serves and has been asked at the clock's beginning."""
    plan = plan_load(facts(10), LoadSpec(), device(1 << 14))
    worker = Worker(1, "d", "m", "/m", plan, "i-1", 0.0, **options)  # type: ignore[arg-type]
    worker.attention.question_s = FakeClock().now_s()
    return worker


def judge(silence: Silence, worker: Worker) -> bool:
    """Note a round, and return whether the worker is ended after it, as the runtime does."""
    silence.note_round([worker])
    problems = [problem for _, problem in silence.find_hung([worker])]
    for problem in problems:
        worker.ended_because = problem
    return bool(problems)


def rounds_until_hung(worker: Worker, *, round_s: float, limit_s: float = LIMIT_S) -> int | None:
    """Return after how many rounds of this length the worker is judged to hang."""
    clock = FakeClock()
    silence = Silence(clock, silent_max_s=limit_s)
    for count in range(1, 100):
        clock.now += round_s
        if judge(silence, worker):
            assert not judge(silence, worker), "once"
            return count
    return None


def test_silence_is_counted_from_the_first_question() -> None:
    """So many rounds of two seconds as make up the limit."""
    worker = a_worker()
    assert rounds_until_hung(worker, round_s=2.0) == LIMIT_S / 2
    assert worker.ended_because == "it did not answer for 20 s"


def test_to_ask_who_hangs_changes_nothing() -> None:
    """Time is counted where a round is noted: whoever asks twice hears the same twice."""
    clock, worker = FakeClock(), a_worker()
    silence = Silence(clock, silent_max_s=2.0)
    clock.now += 2.0
    silence.note_round([worker])
    first = silence.find_hung([worker])
    clock.now += 2.0

    assert [hung for hung, _ in first] == [worker]
    assert silence.find_hung([worker]) == first
    assert (worker.attention.silent_s, worker.ended_because) == (2.0, "")


def test_time_in_which_nobody_could_hear_does_not_count() -> None:
    """A machine that stood still for minutes has not heard its workers either."""
    assert rounds_until_hung(a_worker(), round_s=300.0) == LIMIT_S / ROUND_MAX_S


@pytest.mark.parametrize("limit_s", [0.5, 2.0, ROUND_MAX_S])
@pytest.mark.parametrize("gap_s", [3.0, 300.0])
def test_whoever_could_not_hear_looks_once_more(gap_s: float, limit_s: float) -> None:
    """However short the limit: a server that stood still just when it had asked ends no worker that
    answers then, and does end one that does not."""
    for answers in (True, False):
        clock, worker = FakeClock(), a_worker()
        silence = Silence(clock, silent_max_s=limit_s)
        worker.attention.question_s = clock.now_s()
        clock.now += gap_s
        assert not judge(silence, worker)
        if answers:
            worker.attention.note_answer()
        clock.now += 2.0
        assert judge(silence, worker) is not answers


def test_a_server_that_is_always_slow_still_judges() -> None:
    """It looks once more once: its rounds are what it has."""
    assert rounds_until_hung(a_worker(), round_s=3.0, limit_s=2.0) == 2


@pytest.mark.parametrize("options", [{"endable": False}, {"stopping": True}])
def test_some_have_other_bounds(options: dict[str, bool]) -> None:
    """Those of others are watched elsewhere; those that are being stopped are ended anyway."""
    assert rounds_until_hung(a_worker(**options), round_s=2.0) is None


def test_a_worker_of_another_machine_that_can_be_ended_is_ended() -> None:
    """A fleet's is no process of this machine, and its agent ends it."""
    assert rounds_until_hung(a_worker(local=False), round_s=2.0) == LIMIT_S / 2


def test_for_ever_is_for_ever() -> None:
    """math.inf ends nobody, and nobody is ended who was not asked."""
    assert rounds_until_hung(a_worker(), round_s=2.0, limit_s=math.inf) is None
    worker = a_worker()
    worker.attention.question_s = None
    assert rounds_until_hung(worker, round_s=2.0) is None


def test_an_answer_ends_the_silence_however_late() -> None:
    """Slow is not hung: a worker that takes three rounds for each answer lives on."""
    clock, worker = FakeClock(), a_worker()
    silence = Silence(clock, silent_max_s=LIMIT_S)
    for count in range(100):
        clock.now += 2.0
        assert not judge(silence, worker)
        if count % 3 == 2:
            worker.attention.note_answer()
            worker.attention.question_s = clock.now_s()


def says_age(worker: Worker, age_s: float) -> None:
    """Have the worker answer with figures of this age."""
    worker.attention.note_answer()
    worker.note_figures(WorkerFigures(age_s=age_s), 0.0)


def test_an_engine_that_stands_still_is_ended_though_the_worker_answers() -> None:
    """After so many times the bound of a silent worker, in rounds that were heard."""
    clock, worker = FakeClock(), a_worker()
    silence = Silence(clock, silent_max_s=LIMIT_S)
    for count in range(1, 200):
        clock.now += 2.0
        says_age(worker, 2.0 * count)
        if judge(silence, worker):
            break
    assert count == ENGINE_PATIENCE * LIMIT_S / 2
    assert worker.ended_because == "its engine made no progress for 180 s"


def test_a_long_step_is_no_standstill() -> None:
    """An engine that comes to an end of its step now and then lives on."""
    clock, worker = FakeClock(), a_worker()
    silence = Silence(clock, silent_max_s=LIMIT_S)
    for count in range(1000):
        clock.now += 2.0
        says_age(worker, 0.0 if count % 80 == 79 else 2.0 * (count % 80))
        assert not judge(silence, worker)


def test_one_answer_after_a_pause_is_no_standstill() -> None:
    """Figures of before a machine slept are old in one answer, not in a whole row of them."""
    clock, worker = FakeClock(), a_worker()
    silence = Silence(clock, silent_max_s=LIMIT_S)
    for age_s in (0.0, 100_000.0, 0.0):
        clock.now += 100_000.0
        says_age(worker, age_s)
        assert not judge(silence, worker)
    assert worker.attention.still_s == 0.0


async def until_ended(stack: Stack, rounds_max: int = 1_000_000) -> None:
    """Let time pass until the first worker has ended."""
    process = stack.workers.launcher.processes[0]
    for _ in range(rounds_max):
        if process.exit_code is not None:
            return
        stack.clock.now += 1.0
        await asyncio.sleep(0)
    raise AssertionError("it lives")


@pytest.mark.asyncio
async def test_a_worker_that_answers_nothing_is_ended_and_its_stream_goes_on() -> None:
    """Its client sees a whole stream; the status tells why the worker was ended."""
    async with controller_stack(poll_s=POLL_S, silent_max_s=LIMIT_S) as stack:
        script = stack.workers.script
        script.endless = True
        call = stack.inference.Generate(request())
        messages = aiter(call)
        got = [await anext(messages) for _ in range(script.tokens)]
        await script.parked.wait()
        script.status_gate.clear()
        script.endless = False
        await until_ended(stack)
        assert stack.workers.launcher.processes[0].closes == 1
        script.status_gate.set()
        got += [message async for message in messages]

        assert [i for message in got for i in message.token_ids] == [0, 1, 2]
        assert got[-1].usage.migrations == 1
        (dead,) = stack.runtime.workers.dead()
        assert isinstance(dead.error, WorkerLost)
        assert dead.error.cause.startswith("it did not answer for")


@pytest.mark.asyncio
async def test_a_worker_whose_engine_stands_still_is_ended() -> None:
    """It answers each question, and its figures stay old; the status tells why it was ended."""
    async with controller_stack(poll_s=POLL_S, silent_max_s=LIMIT_S / 10) as stack:
        await stack.generate(keep_alive=duration_to_pb(-1.0))
        stack.workers.script.figures_age_s = ENGINE_STILL_S
        await until_ended(stack)
        async with asyncio.timeout(HEARD_S_MAX):
            while not stack.runtime.workers.dead():  # noqa: ASYNC110 - it is told to nobody
                await asyncio.sleep(0)

        (dead,) = stack.runtime.workers.dead()
        assert isinstance(dead.error, WorkerLost)
        assert dead.error.cause.startswith("its engine made no progress for")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (InternalError("e-1"), True),
        (RemoteError(grpc.StatusCode.UNAVAILABLE, "Socket closed"), False),
        (RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), False),
    ],
)
async def test_an_error_of_its_own_is_an_answer(error: MlxdError, *, answers: bool) -> None:
    """A worker that says what is wrong lives; where gRPC fails, nobody has said anything."""
    async with controller_stack() as stack:
        await stack.generate()
        (worker,) = stack.runtime.workers.live()
        stack.workers.script.status_error = error
        await stack.runtime.workers.refresh([worker], wait_s=1.0)

        assert (worker.attention.question_s is None) is answers


def test_the_default_leaves_a_slow_worker_time() -> None:
    """Several rounds fit into the limit, so that one bad moment never ends a worker."""
    assert config.WORKER_SILENT_MAX_S >= 5 * ROUND_MAX_S
