"""What a worker's exit says; ranks that follow end as their leader does."""

from __future__ import annotations

from enum import IntEnum

from mlxd_shared import config


class ExitCode(IntEnum):
    """What the process's exit says."""

    OK = 0
    BAD_OPTIONS = 2  # argparse's own
    CANNOT_START = 3
    LOAD_FAILED = 4
    ENGINE_FAILED = 70
    RANK_KILLED = config.RANK_KILLED_CODE  # from outside, and so the whole group
