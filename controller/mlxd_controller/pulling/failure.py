"""Why a model could not be pulled, in words for the user."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """What kind of trouble it is."""

    NOT_FOUND = enum.auto()
    NO_ANSWER = enum.auto()
    OTHER = enum.auto()


class PullFailed(Exception):
    """A pull that did not come to its end; what has come by then stays for the next one."""

    def __init__(self, message: str, reason: Reason = Reason.OTHER) -> None:
        super().__init__(message)
        self.reason = reason
