"""How long a path takes and how long the plain way: in turn, so that drift of the machine is fair.

The measure is the whole engine's: streams that come, are read, and decode side by side, and one
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.judging import is_fair, slowness
from mlxd_worker.proof.streams import Streams, prompts_of
from mlxd_worker.proof.subjects import Subject

ROUNDS_LEAST: Final = 2
ROUNDS: Final = 5
"""Of a path that looks slower, at most: a disturbance of a few is then no verdict."""
ROWS: Final = 8
PROMPT_TOKENS: Final = 96
Run = Callable[[], None]
"""One run of what is timed."""
MakeRun = Callable[[], Run]
"""Makes a run with the switches as they are: models are built, and everything is warm."""


def engine_run(subject: Subject) -> MakeRun:
    """Return what makes runs of an engine on the subject's model."""

    def make() -> Run:
        model = subject.make()
        engine = Streams(model, subject, rows=ROWS)
        company = prompts_of(model.vocab_size, (PROMPT_TOKENS,) * ROWS)

        def run() -> None:
            for streams in (company[:1], company):
                for each in streams:
                    engine.submit(each)
                engine.run()

        run()
        return run

    return make


def time_path(
    path: FastPath,
    make: MakeRun,
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> str | None:
    """Return by how much a path is slower than doing without it, or None.

    After the least number of rounds a path that is plainly no slower is let off.
    """
    fast = make()
    with SWITCHES.without(path):
        plain = make()
    with_s: list[float] = []
    without_s: list[float] = []
    for _ in range(rounds):
        with_s.append(_time(fast, clock))
        with SWITCHES.without(path):
            without_s.append(_time(plain, clock))
        if len(with_s) >= ROUNDS_LEAST and is_fair(with_s, without_s):
            break
    return slowness(with_s, without_s)


def _time(run: Run, clock: Callable[[], float]) -> float:
    began_s = clock()
    run()
    return clock() - began_s
