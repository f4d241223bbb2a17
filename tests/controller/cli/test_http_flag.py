"""`--http` with and without an address, and what a gateway is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd_controller.cli.http import complete_flag
from mlxd_controller.gateway import MODULE, command_of
from mlxd_shared import config

DEFAULT = config.DEFAULT_HTTP_ADDRESS
LINES = [
    (["--http"], ["--http", DEFAULT]),
    (["--http", "--model", "m"], ["--http", DEFAULT, "--model", "m"]),
    (["--http", "127.0.0.1:1"], ["--http", "127.0.0.1:1"]),
    (["--http=127.0.0.1:1", "--reserve", "2G"], ["--http=127.0.0.1:1", "--reserve", "2G"]),
    (["--model", "--http"], ["--model", "--http", DEFAULT]),
]


@pytest.mark.parametrize(("line", "completed"), LINES)
def test_an_address_may_be_left_out(line: list[str], completed: list[str]) -> None:
    """The default stands in where nothing, or another option, follows."""
    assert complete_flag(line) == completed


def test_a_gateway_is_told_by_one_argument() -> None:
    """A JSON object of what was said; what was not is left out."""
    *command, told_json = command_of({"tls_key": Path("/k"), "origins": ["a"], "tls_cert": None})
    assert command[1:] == ["-m", MODULE]
    assert json.loads(told_json) == {"tls_key": "/k", "origins": ["a"]}
