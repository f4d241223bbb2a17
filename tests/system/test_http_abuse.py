"""A gateway under spoilt requests, idle connections and readers that do not read; in miniature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.chat_template import write_template
from tests.support.effort import IN_CI
from tests.support.http_abuse import check_abuse

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"


@pytest.mark.asyncio
async def test_a_gateway_under_abuse(tmp_path: Path) -> None:
    """Never an error of ours and never a hang, and good requests go on beside it."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    await check_abuse(write_template(folder), count=120 if IN_CI else 60, idle=50, slow=4)
