"""`python -m mlxd_worker.bench FOLDER`: an engine as a worker has it, without a server around it.

One JSON request a line in, `{"prompts": [IDS, ...], "max_tokens": N}`, whose streams run side by
side; one JSON answer a line out, `{"outcomes": [...], "peak_nbytes": N}`. The first line, once the
model is loaded, says what there is; where that fails it is `{"error": TEXT}`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec, Sampling, Weights
from mlxd_shared.ops import logs
from mlxd_shared.ops.measuring import Outcome
from mlxd_worker.bench.peer import say
from mlxd_worker.engine.request import Event, Failed, Sink, StreamId, Submit
from mlxd_worker.machine.backend import Backend, prepare_backend

if TYPE_CHECKING:  # MLX is imported once its BLAS is there
    from mlxd_worker.thread.resident import Resident

_numbers = itertools.count(1)
_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Timed(Sink):
    """The sink of a stream that is timed. One owner: the thread that steps the engine."""

    def __init__(self) -> None:
        """Begin now."""
        self._sent_s = time.perf_counter()
        self._stamps_s: list[float] = []
        self._counts: list[int] = []

    def put(self, event: Event) -> None:
        """Note the time of an event with tokens; raises the error of a stream that has failed."""
        now_s = time.perf_counter()
        if isinstance(event, Failed):
            raise event.error
        if event.ids:
            self._stamps_s.append(now_s)
            self._counts.append(len(event.ids))

    @property
    def outcome(self) -> Outcome:
        """When its tokens came, as the engine tells them."""
        return Outcome(self._sent_s, tuple(self._stamps_s), tuple(self._counts), "")


def main() -> int:
    """Serve requests from standard input until it closes."""
    parser = argparse.ArgumentParser(prog="python -m mlxd_worker.bench")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--weights", choices=[each.value for each in Weights], required=True)
    args = parser.parse_args()
    logs.configure(level="warning", fmt="json")
    spec = LoadSpec(
        context_length=args.context,
        rows_max=args.rows,
        weights=Weights(args.weights),
        prefix_cache_nbytes=0,
    )
    try:
        _serve(args.folder, spec, prepare_backend())
    except MlxdError as error:
        say(error=error.describe())
        return 1
    return 0


def _serve(folder: Path, spec: LoadSpec, backend: Backend) -> None:
    """Load the model, say so, and answer each request."""
    import mlx.core as mx  # noqa: PLC0415 - the BLAS stands under it by now

    from mlxd_worker.machine.device_name import device_name  # noqa: PLC0415
    from mlxd_worker.thread.facts import LoadJob  # noqa: PLC0415
    from mlxd_worker.thread.resident import make_resident  # noqa: PLC0415

    job = LoadJob(path=folder, name="bench", digest="", spec=spec)
    resident = make_resident(job, device=backend.kind, report=lambda _: None)
    say(
        vocab_size=resident.facts.vocab_size,
        weights=resident.facts.weights.value,
        device=device_name(backend.kind),
        blas=backend.blas.name,
    )
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        mx.reset_peak_memory()
        outcomes = run_streams(resident, request["prompts"], request["max_tokens"])
        say(outcomes=[asdict(outcome) for outcome in outcomes], peak_nbytes=mx.get_peak_memory())


def run_streams(resident: Resident, prompts: list[list[int]], max_tokens: int) -> list[Outcome]:
    """Run greedy streams side by side to their ends; raises the error of one that fails."""
    sinks = [Timed() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        resident.engine.submit(
            Submit(
                stream=StreamId(next(_numbers)),
                prompt=tuple(prompt),
                sampling=_GREEDY,
                max_tokens=max_tokens,
                submitted_s=time.monotonic(),
                sink=sink,
            )
        )
    while resident.engine.busy:
        resident.engine.step()
    return [sink.outcome for sink in sinks]


if __name__ == "__main__":
    sys.exit(main())
