"""What keys may do: models, requests at once and rates, on a clock that tests move."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.v1 import inference_pb2
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.services.allowances import Allowances, Bucket
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.inference import InferenceService
from mlxd_controller.services.meter import Counts
from mlxd_shared.domain.errors import KeyLimit, NotAllowed
from mlxd_shared.ops.metrics import labels
from mlxd_shared.security.callers import current_caller
from mlxd_shared.security.keys import Caller, Key
from tests.controller.services.test_names_asked_for import Unhurried
from tests.fakes.workers import PROMPT_TOKENS
from tests.fakes.world import FakeClock
from tests.support.controller_stack import controller_stack, request, store_of

NAMES = ("work", "org/model")


@pytest.fixture(name="clock")
def fake_clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


def allowances_on(clock: FakeClock) -> Allowances:
    """Return accounts of nobody yet."""
    return Allowances(clock, Metrics())


def spend(allowances: Allowances, key: Key | None, tokens: int = 0) -> None:
    """Make one request, which costs so many tokens."""
    counts = Counts()
    with allowances.spending(key, NAMES, counts):
        counts.prompt_tokens, counts.generated_tokens = tokens // 2, tokens - tokens // 2


def test_no_key_is_not_limited(clock: FakeClock) -> None:
    """Nor counted under any name."""
    allowances = allowances_on(clock)
    spend(allowances, None, 10**9)
    assert allowances.gauges() == {}
    assert allowances.metrics.key_requests.points == {}


@pytest.mark.parametrize(("models", "allowed"), [
    ((), True), (("work",), True), (("org/model",), True), (("other",), False),
])  # fmt: skip
def test_models_by_any_of_their_names(
    clock: FakeClock, models: tuple[str, ...], *, allowed: bool
) -> None:
    """By the name that was asked for, such as an alias, or the model's own."""
    allowances, key = allowances_on(clock), Key("k", "", models=frozenset(models))
    if allowed:
        spend(allowances, key)
    else:
        with pytest.raises(NotAllowed, match="the key 'k' is not for the model 'work'"):
            spend(allowances, key)
    outcome = "served" if allowed else "refused"
    assert allowances.metrics.key_requests.points == {labels(key="k", outcome=outcome): 1.0}


def test_requests_at_once(clock: FakeClock) -> None:
    """One more than the limit is refused; one that has ended, however, makes room."""
    allowances, key = allowances_on(clock), Key("k", "", streams=2)
    with ExitStack() as first, ExitStack() as second:
        for stack in (first, second):
            stack.enter_context(allowances.spending(key, NAMES, Counts()))
        assert allowances.gauges() == {labels(key="k"): 2.0}
        with pytest.raises(KeyLimit) as caught:
            spend(allowances, key)
        assert (caught.value.what, caught.value.limit) == ("requests at once", 2)
        with pytest.raises(ZeroDivisionError), first:
            raise ZeroDivisionError
        spend(allowances, key)
    assert allowances.gauges() == {labels(key="k"): 0.0}


@given(limit=st.integers(1, 50), gaps=st.lists(st.floats(0, 20), max_size=80))
def test_requests_a_minute(limit: int, gaps: list[float]) -> None:
    """Whenever they come, no span has more than its share and one burst; who waits as told may."""
    clock = FakeClock(0.0)
    allowances, key = allowances_on(clock), Key("k", "", requests_per_minute=limit)
    for served, gap in enumerate(gaps, start=1):
        clock.now += gap
        try:
            spend(allowances, key)
        except KeyLimit as error:
            clock.now += error.retry_after_s
            spend(allowances, key)
        assert served <= limit + clock.now_s() * limit / 60 + 1e-6


def test_tokens_are_owed(clock: FakeClock) -> None:
    """A request that cost more than was there is paid for by waiting, to the millisecond."""
    allowances, key = allowances_on(clock), Key("k", "", tokens_per_minute=60)
    spend(allowances, key, 90)  # 30 more than a minute's worth
    with pytest.raises(KeyLimit) as caught:
        spend(allowances, key)
    assert (caught.value.what, caught.value.retry_after_s) == ("tokens a minute", 31.0)
    clock.now += 30.9
    with pytest.raises(KeyLimit):
        spend(allowances, key)
    clock.now += 0.1
    spend(allowances, key, 1)
    points = allowances.metrics
    assert points.key_prompt_tokens.points == {labels(key="k"): 45.0}
    assert points.key_generated_tokens.points == {labels(key="k"): 46.0}


@pytest.mark.asyncio
async def test_who_calls_is_who_pays() -> None:
    """Streams and questions alike are charged to the key of the call, and none without one."""
    store = store_of({"a": 10})
    async with controller_stack(store=store) as stack:
        allowances = Allowances(stack.clock, Metrics())
        catalog = Catalog(store, stack.runtime)
        service = InferenceService(catalog, stack.runtime, stack.clock, allowances=allowances)
        call: Any = Unhurried()
        for key in (None, Key("k", "")):
            caller = current_caller.set(Caller(key))
            try:
                async for _ in service.Generate(request(), call):
                    pass
                await service.Embed(inference_pb2.EmbedRequest(model="a", texts=["b"] * 4), call)
            finally:
                current_caller.reset(caller)
    points = allowances.metrics
    assert points.key_requests.points == {labels(key="k", outcome="served"): 2.0}
    assert points.key_prompt_tokens.points == {labels(key="k"): PROMPT_TOKENS + 4.0}
    assert points.key_generated_tokens.points == {labels(key="k"): 3.0}


def test_an_idle_key_saves_no_more_than_a_minute(clock: FakeClock) -> None:
    """An hour's silence is worth one burst."""
    bucket = Bucket.full(60, clock.now_s())
    assert bucket.wait_s(clock.now_s() + 3600, 60) == 0
    bucket.take(60)
    assert bucket.wait_s(clock.now_s() + 3600, 1) == 1.0


def test_changed_limits_hold_at_once(clock: FakeClock) -> None:
    """What is under way still counts, and a lower rate begins anew."""
    allowances = allowances_on(clock)
    with allowances.spending(Key("k", ""), NAMES, Counts()):
        with pytest.raises(KeyLimit):
            spend(allowances, Key("k", "", streams=1))
        spend(allowances, Key("k", "", streams=2))
    assert allowances.gauges() == {labels(key="k"): 0.0}
