"""Real models, tokenizers, templates, schemas and traces, which lie in tests/data with the tests.

Everybody has them, so no test skips for want of one: a run anywhere is the same run.
"""

from __future__ import annotations

from pathlib import Path

REAL_INPUTS = Path(__file__).resolve().parent / "data"


def real_input(*parts: str) -> Path:
    """Return a file or folder of the real inputs. Raises FileNotFoundError where there is none."""
    path = REAL_INPUTS.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"not in tests/data: {'/'.join(parts)}")
    return path
