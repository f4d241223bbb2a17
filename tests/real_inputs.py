"""Finds the real inputs that lie beside the repository; a test that needs them skips without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MLXD_SHARED_DATA"
_BESIDE = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
REAL_INPUTS = Path(os.environ.get(VARIABLE) or _BESIDE)


def real_input(*parts: str) -> Path:
    """Return a file or folder of the real inputs, or skip the test that asks."""
    path = REAL_INPUTS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no real inputs: {'/'.join(parts)} (set {VARIABLE})")
    return path
