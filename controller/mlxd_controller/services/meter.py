"""Counts one Generate, however it ends."""

from __future__ import annotations

from types import TracebackType

import grpc

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.metrics.counters import NO_FINISH, UNKNOWN_MODEL, Metrics, StreamUsage
from mlxd_controller.runtime.ports import Clock
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.convert import FINISH_FROM_PB
from mlxd_shared.wire.records import read
from mlxd_shared.wire.status import end_code

_log = get_logger("inference")


class Meter:
    """A context around one Generate; `model` is set as soon as it is known."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        """Begin to measure."""
        self.model = UNKNOWN_MODEL
        self.resumed = 0
        """How many tokens the client had before."""
        self._metrics = metrics
        self._clock = clock
        self._begun_s = clock.now_s()
        self._first_s: float | None = None
        self._last: inference_pb2.GenerateResponse | None = None

    @property
    def age_s(self) -> float:
        """How long ago the request came."""
        return self._clock.now_s() - self._begun_s

    def saw_frame(self) -> None:
        """Note a message of the stream."""
        if self._first_s is None:
            self._first_s = self.age_s
            self._metrics.first_token.observe(self._first_s, model=self.model)

    def broke_off(self, tokens: int) -> None:
        """Note that the stream has no end, and what it carried up to there."""
        self._metrics.generated_tokens.add(tokens, model=self.model)

    def complete(self, last: inference_pb2.GenerateResponse) -> None:
        """Note the stream's last message, which carries its usage."""
        self._last = last
        self._metrics.count_use(
            read(StreamUsage, last.usage), model=self.model, resumed=self.resumed
        )

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = self.age_s
        finish = NO_FINISH if self._last is None else _finish_label(self._last.finish)
        code = end_code(error) if self._last is None else grpc.StatusCode.OK
        self._metrics.count_end(model=self.model, code=code, finish=finish, duration_s=seconds)
        tokens = 0 if self._last is None else self._last.usage.completion_tokens
        _log.info(
            "generate ended",
            code=code.name,
            finish=finish,
            tokens=tokens,
            seconds=round(seconds, 3),
        )


def _finish_label(finish: types_pb2.Finish) -> str:
    reason = FINISH_FROM_PB.get(finish.reason)
    return NO_FINISH if reason is None else reason.value
