"""Two ranks, and what is refused or goes wrong there; a process of its own.

`python -m tests.worker.distributed.case_run CASE MODEL`, a function's name here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import LoadSpec, Sampling
from mlxd_shared.ops import logs
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.thread.engine_thread import EngineThread
from mlxd_worker.thread.facts import LoadJob
from tests.worker.distributed.leading import lead
from tests.worker.distributed.rank_run import Heard

FRAME_MAX = 4096
SLOW_S = 0.1
LIMIT_S = 4.0


def tell(value: object) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def job_of(model: Path) -> LoadJob:
    """Return the load of a model."""
    return LoadJob(model, "demo", "d" * 64, LoadSpec(rows_max=2))


def asks(
    number: int,
    sink: Heard,
    prompt: int = 3,
    constraint: Constraint | None = None,
) -> Submit:
    """Return a short stream."""
    return Submit(
        stream=StreamId(number),
        prompt=tuple(range(5, 5 + prompt)),
        sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
        max_tokens=4,
        submitted_s=0.0,
        sink=sink,
        constraint=constraint,
    )


def refusals(model: Path) -> None:
    """Tell what each refused thing says, and that the group serves on; then let a rank differ."""
    config.RANK_FRAME_BYTES_MAX = FRAME_MAX  # of this rank alone
    host = lead(2)
    try:
        host.load(job_of(model / "none"), lambda _: None)
    except MlxdError as error:
        tell({"load": error.describe()})
    formats = host.load(job_of(model), lambda _: None).constraints
    tell([host.shrink(nbytes) for nbytes in ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)])
    config.RANK_CHECK_STEPS = 1
    sinks = {name: Heard() for name in ("slow", "long", "served")}
    slow = formats.compile(ResponseFormat(FormatKind.REGEX, "[a-z ]{9}"))
    host.submit(asks(1, sinks["slow"], constraint=replace(slow, mask_s=SLOW_S)))
    host.submit(asks(2, sinks["long"], prompt=FRAME_MAX))
    host.submit(asks(3, sinks["served"]))
    with slow.turns.lock:  # no mask of it is made
        while host.busy:
            host.step()
    tell({name: sink.error or len(sink.ids) for name, sink in sinks.items()})
    host.marks = lambda: ((1,),)  # type: ignore[method-assign]
    host.submit(asks(5, Heard()))
    while True:
        host.step()


def stands(model: Path) -> None:
    """Load, and come no further than the warm-up."""
    config.RANK_LOAD_STEP_S = LIMIT_S
    host = lead(2)

    def report(progress: LoadProgress) -> None:
        if progress.stage == "warming up":
            tell("stands")
            threading.Event().wait()

    host.load(job_of(model), report)


def absent(model: Path) -> None:
    """Wait for a follower that does not come."""
    del model
    config.RANK_JOIN_S = LIMIT_S
    lead(2, module="tests.worker.distributed.absent")


def early(model: Path) -> None:
    """Meet a follower that gets a stop's signals first, and let it go."""
    del model
    host = lead(2, module="tests.worker.distributed.hit_early")
    tell("met")
    host.leave()


def leaves(model: Path) -> None:
    """Stop an engine's thread, with which its followers end; all is quiet then."""
    del model

    async def start_and_stop() -> None:
        loop = asyncio.get_running_loop()
        faults: list[None] = []
        engine = EngineThread(
            device=DeviceKind.CPU,
            loop=loop,
            on_fault=lambda: faults.append(None),
            make_host=lambda _: lead(2),
        )
        engine.start()
        await engine.ready()
        await engine.stop()
        assert not faults

    asyncio.run(start_and_stop())
    for thread in threading.enumerate():
        if thread.name == "ranks":
            thread.join()
    tell("left")


if __name__ == "__main__":
    logs.configure(level="info", fmt="json")  # not among the lines
    prepare_backend()
    cases = {each.__name__: each for each in (refusals, stands, absent, early, leaves)}
    cases[sys.argv[1]](Path(sys.argv[2]))
