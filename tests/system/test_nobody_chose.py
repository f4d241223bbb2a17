"""What was nobody's choice is nowhere said to be one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cli import mlxd
from tests.support.served import serve

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
CHOICE = re.compile(r"\b(user|you|operator)s? (chose|asked|wanted)|\bas (asked|chosen|wanted)\b")


@pytest.mark.asyncio
async def test_a_load_without_options_names_no_choice() -> None:
    """Neither the fit, the load, the status nor the worker's own log; one that was made, does."""
    async with serve("--model", f"demo={DEMO}") as server:
        where = ("--address", server.address)
        chosen = await mlxd("fit", "demo", "--prefix-cache", "3M", *where)
        said = [
            await mlxd(*command, *where)
            for command in (("fit", "demo"), ("load", "demo"), ("status",), ("logs", "demo"))
        ]
    assert [ran.code for ran in said] == [0] * 4
    assert [CHOICE.findall(ran.out + ran.err) for ran in said] == [[]] * 4
    assert CHOICE.search(chosen.out)
