"""`mlxd serve` where the extra `worker` is not installed: said at the start, and to who asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import mlxd
from tests.support.served import serve

BASE_INSTALL = """
import importlib.abc, importlib.metadata, sys

MISSING = {"jinja2", "llguidance", "mlx", "mlx-cpu", "numpy", "tokenizers"}
real = importlib.metadata.Distribution.from_name

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def from_name(name):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Refuse())
importlib.metadata.Distribution.from_name = staticmethod(from_name)
"""
"""What hides the extra from every Python that finds it as sitecustomize, the workers' too."""


@pytest.mark.asyncio
async def test_the_base_install_says_what_it_lacks(tmp_path: Path) -> None:
    """In a sentence with its remedy, at the start and at each load; nothing is a traceback."""
    (tmp_path / "sitecustomize.py").write_text(BASE_INSTALL, encoding="utf-8")
    async with serve(environment={"PYTHONPATH": str(tmp_path)}) as server:
        where = ("--address", server.address)
        answer, fit = (
            await mlxd("generate", "demo", "Once", *where),
            await mlxd("fit", "demo", *where),
        )
        complaint = server.find_logged("no worker can run here")
        log = server.log_path.read_text(encoding="utf-8")

    remedy = "tokenizers are not installed; install exactly one of mlxd[worker,cpu] and"
    assert remedy in complaint["reason"]
    assert (answer.code, answer.out) == (1, "")
    assert remedy in answer.err
    assert "Traceback" not in log + answer.err
    assert fit.code == 0
