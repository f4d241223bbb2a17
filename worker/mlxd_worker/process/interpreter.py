"""How the interpreter runs where an engine's thread shares it with others."""

from __future__ import annotations

from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""How long another thread may keep the interpreter while the engine's thread wants it. By default
it is 5 ms, a tenth of a step, in which nothing computes (decision 0022)."""
