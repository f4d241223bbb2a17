"""What attached workers hold when a controller starts."""

from __future__ import annotations

import pytest

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.crew import Crew, held
from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.ports import Ports
from tests.fakes.store import FakeStore
from tests.fakes.workers import FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.model_facts import device, facts


class _Heard(AttachedLauncher):
    """Workers that have said what they hold."""

    def __init__(self, *figures: status_pb2.WorkerStatus) -> None:
        super().__init__([])
        self._figures = figures

    async def heard(self, *, wait_s: float) -> tuple[status_pb2.WorkerStatus, ...]:
        """Return what they hold."""
        del wait_s
        return self._figures


def crew(*figures: status_pb2.WorkerStatus) -> Crew:
    """A crew whose attached workers say this."""
    workers = FakeWorkers()
    ports = Ports(workers.launcher, workers.connect, FakeProbe(device(1)), FakeClock())
    return Crew(ports, None, _Heard(*figures))


def ready(digest: str, *, weights: int = 0, kv_format: int = 0) -> status_pb2.WorkerStatus:
    """A worker that holds a model."""
    found = status_pb2.WorkerStatus(model_digest=digest, context_length=512, rows_max=2)
    found.state = types_pb2.MODEL_STATE_READY
    found.weights = types_pb2.WeightsFormat.ValueType(weights)
    found.kv_format = types_pb2.KvFormat.ValueType(kv_format)
    return found


@pytest.mark.asyncio
async def test_models_that_are_not_understood_are_left_where_they_are() -> None:
    """One that is not configured here, and forms of a later version, end no start."""
    store = FakeStore({"a": ("d", facts(10)), "b": ("e", facts(10))})
    figures = (ready("d"), ready("x"), ready("e", weights=99), ready("e", kv_format=99))
    found = await held(crew(*figures), store)
    assert [(ref.name, spec.context_length) for ref, spec in found] == [("a", 512)]
