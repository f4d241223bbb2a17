"""What `mlxd serve` takes from its environment: durations, where no option gives them."""

from __future__ import annotations

import asyncio
import math

import pytest
import typer
from structlog.testing import capture_logs

from mlxd import Client
from mlxd_controller.cli import options
from mlxd_controller.cli.configuration.environment import (
    KEEP_ALIVE_VARIABLE,
    LOAD_TIMEOUT_VARIABLE,
    keep_alive_s,
    load_timeout_s,
)
from mlxd_shared import config
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.wire.records import duration_from_pb, duration_to_pb
from tests.support.served import serve

FIVE_MINUTES_S = 300.0
GOOD = [
    ("", FIVE_MINUTES_S),
    ("60", 60.0),
    ("1h2m3s", 3723.0),
    ("0", 0.0),
    ("-0", 0.0),
    ("-1", math.inf),
    ("-1m", math.inf),
]
BAD = [" ", "???", "1d"]
LIMIT_S = 60.0


@pytest.mark.parametrize(("text", "seconds"), GOOD)
def test_keep_alive_of_the_environment(text: str, seconds: float) -> None:
    """A number is seconds, parts add up, 0 is not at all, negative is for ever, empty is absent."""
    with capture_logs() as log:
        assert keep_alive_s(None, {KEEP_ALIVE_VARIABLE: text}) == seconds
    assert log == []


@pytest.mark.parametrize(("text", "seconds"), GOOD)
def test_load_timeout_of_the_environment(text: str, seconds: float) -> None:
    """As keep-alive, but 0 is for ever: nobody wants every load to fail."""
    found_s = load_timeout_s(None, {LOAD_TIMEOUT_VARIABLE: text})

    assert found_s == (seconds or math.inf)


@pytest.mark.parametrize("text", BAD)
def test_nonsense_in_the_environment_is_passed_over_aloud(text: str) -> None:
    """Five minutes hold, and a warning names the variable and quotes the value."""
    with capture_logs() as log:
        assert keep_alive_s(None, {KEEP_ALIVE_VARIABLE: text}) == FIVE_MINUTES_S
        assert load_timeout_s(None, {LOAD_TIMEOUT_VARIABLE: text}) == FIVE_MINUTES_S

    assert [line["log_level"] for line in log] == ["warning", "warning"]
    assert [line["variable"] for line in log] == [KEEP_ALIVE_VARIABLE, LOAD_TIMEOUT_VARIABLE]
    assert all(repr(text) in line["reason"] for line in log)


def test_without_a_variable_the_defaults_hold() -> None:
    """Five minutes both, and for a load that is time without progress."""
    assert keep_alive_s(None, {}) == config.KEEP_ALIVE_DEFAULT_S == FIVE_MINUTES_S
    assert load_timeout_s(None, {}) == config.LOAD_STALL_TIMEOUT_S == FIVE_MINUTES_S


def test_an_option_beats_the_environment() -> None:
    """Also where it says 0."""
    environment = {KEEP_ALIVE_VARIABLE: "7", LOAD_TIMEOUT_VARIABLE: "7"}

    assert keep_alive_s(0.0, environment) == 0.0
    assert load_timeout_s(9.0, environment) == 9.0
    assert load_timeout_s(0.0, environment) == math.inf


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("0", 0.0), ("-1", math.inf)])
def test_keep_alive_of_a_request(text: str, seconds: float) -> None:
    """What is typed reaches the controller: seconds, and negative for ever."""
    assert duration_from_pb(duration_to_pb(options.duration(text))) == seconds


@pytest.mark.parametrize("text", BAD)
def test_nonsense_in_a_request_is_refused(text: str) -> None:
    """Unlike a variable: whoever typed it sees the refusal."""
    with pytest.raises(typer.BadParameter, match="is not a duration"):
        options.duration(text)


@pytest.mark.asyncio
async def test_the_variables_are_in_force() -> None:
    """An idle model goes at once, a load has no time limit, and nonsense stops no start."""
    environment = {KEEP_ALIVE_VARIABLE: "0", LOAD_TIMEOUT_VARIABLE: "0"}
    async with serve(environment=environment) as server, Client(server.address) as client:
        async with asyncio.timeout(LIMIT_S):
            await client.complete("once", model="demo", max_tokens=1)
            async with client.watch_models("demo") as changes:
                async for model in changes:
                    if model.state is ModelState.UNLOADED:
                        break
    async with serve(environment={KEEP_ALIVE_VARIABLE: "1d"}) as server:
        line = server.find_logged("a variable that means nothing is passed over")
        assert (line["level"], line["variable"]) == ("warning", KEEP_ALIVE_VARIABLE)
        assert line["in_force"] == "5m00s"
