"""Durations that `mlxd serve` takes from its environment, where no option gives them.

Invariants:
- An option beats the variable, the variable beats the default.
- A value that is no duration never stops a start: the default holds, and the log says so. An
  option that is none is refused, because its user sees the refusal.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxd_shared import config
from mlxd_shared.domain.units import FOREVER_S, format_duration, parse_duration
from mlxd_shared.ops.logs import get_logger

KEEP_ALIVE_VARIABLE = "MLXD_KEEP_ALIVE"
LOAD_TIMEOUT_VARIABLE = "MLXD_LOAD_TIMEOUT"
_log = get_logger("settings")


def keep_alive_s(option_s: float | None, environment: Mapping[str, str]) -> float:
    """Return how long an idle model stays; 0 is not at all, FOREVER_S for ever."""
    if option_s is not None:
        return option_s
    return _duration_s(environment, KEEP_ALIVE_VARIABLE, config.KEEP_ALIVE_DEFAULT_S)


def load_timeout_s(option_s: float | None, environment: Mapping[str, str]) -> float:
    """Return after how long without progress a load is given up; 0 and FOREVER_S are never."""
    wanted_s = option_s
    if wanted_s is None:
        wanted_s = _duration_s(environment, LOAD_TIMEOUT_VARIABLE, config.LOAD_STALL_TIMEOUT_S)
    return wanted_s or FOREVER_S


def _duration_s(environment: Mapping[str, str], variable: str, default_s: float) -> float:
    text = environment.get(variable, "")
    if not text:
        return default_s
    try:
        return parse_duration(text)
    except ValueError as error:
        _log.warning(
            "a variable that means nothing is passed over",
            variable=variable,
            reason=str(error),
            in_force=format_duration(default_s),
        )
        return default_s
