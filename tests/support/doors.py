"""A worker, real but for one thing: it writes down whenever it counts or checks a Generate.

`Watch` does the same in this process. Both are told by the interpreter's own profiler, on the event
loop's thread: requests of a few bytes are read there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mlxd_shared.wire.convert_bounds import list_violations
from mlxd_shared.wire.wire_scan import scan
from tests.support import single_token_worker

DOOR_VARIABLE = "TEST_DOOR_FILE"
"""Names the file that a worker writes to, in its environment."""
COUNTED, CHECKED = "counted", "checked"
GENERATE = "mlxd.v1.GenerateRequest"


def profiler(note: Callable[[str], None]) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that has each look at a Generate noted."""

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is scan.__code__ and frame.f_locals["plan"].name == GENERATE:
            note(COUNTED)
        if frame.f_code is list_violations.__code__:
            note(CHECKED)

    return look


class Watch:
    """What this process does to requests around the body."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> Watch:
        sys.setprofile(profiler(self.seen.append))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.setprofile(None)


def main() -> None:
    """Run the worker with its own command line."""
    with Path(os.environ[DOOR_VARIABLE]).open("a", encoding="utf-8", buffering=1) as file:
        sys.setprofile(profiler(lambda what: print(what, file=file)))
        single_token_worker.main()


if __name__ == "__main__":
    main()
