"""Where grammars are tried out before this worker's own library sees them: children (`trial`)."""

from __future__ import annotations

import sys
from typing import Final

from mlxd_shared.domain.errors import ShuttingDown
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.constraints.trial")


class TrialError(Exception):
    """A grammar that did not survive its trial; the text says what became of it."""


class Trials:
    """A pool of such children; as many as threads run trials at once. Any thread."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        """Start nothing yet."""
        self._children = Pool(command)

    def run(self, source: str, *, limit_s: float) -> str:
        """Return why the library refuses a grammar; an empty text where it is good.

        Raises:
            TrialError: it took longer than `limit_s`, or ended the process.
            ShuttingDown: the children were ended.
        """
        try:
            return self._children.ask(source.encode(), limit_s=limit_s).decode()
        except Late:
            raise TrialError(f"not compiled within {limit_s:g} s") from None
        except Died:
            problem = "takes more memory, or a deeper stack, than there is for it"
            raise TrialError(problem) from None
        except Closed:
            raise ShuttingDown from None

    def close(self) -> None:
        """End the children, in the middle of a trial too; start none any more. Waits for it."""
        self._children.close()
