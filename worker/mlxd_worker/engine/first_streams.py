"""The first streams of a loaded model, run before READY: whether it generates at all."""

from __future__ import annotations

from typing import Final

from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.loop import Engine
from mlxd_worker.engine.request import Event, Failed, Sink, StreamId, Submit

PROMPT_TOKENS: Final = 4
NEW_TOKENS: Final = 2
ROWS_MAX: Final = 2


class _FirstError(Sink):
    """Keeps the first error that one of several streams ends with."""

    error: MlxdError | None = None

    def put(self, event: Event) -> None:
        """Look at an event."""
        if isinstance(event, Failed):
            self.error = self.error or event.error


def run_first_streams(engine: Engine) -> None:
    """Decode rows side by side; raises the MlxdError that the first of them to fail ends with."""
    sink = _FirstError()
    for index in range(min(ROWS_MAX, engine.limits.rows_max)):
        engine.submit(
            Submit(
                stream=StreamId(-1 - index),
                prompt=(0,) * (PROMPT_TOKENS + index),
                sampling=Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.0, seed=0),
                max_tokens=NEW_TOKENS,
                submitted_s=0.0,
                sink=sink,
            )
        )
    while engine.busy:
        engine.step()
    if sink.error is not None:
        raise sink.error
