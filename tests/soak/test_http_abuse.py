"""A gateway under 2,000 spoilt requests, 500 idle connections and 50 readers that do not read."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.chat_template import write_template
from tests.support.http_abuse import check_abuse

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
async def test_a_gateway_under_long_abuse(tmp_path: Path) -> None:
    """Never an error of ours and never a hang; prints what became of all, as a JSON object."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    abused = await check_abuse(write_template(folder), count=2000, idle=500, slow=50, silent=0.1)
    sys.stdout.write(json.dumps(asdict(abused)) + "\n")
