"""What attached workers hold when a controller starts."""

from __future__ import annotations

import pytest

from mlxd_controller.crew import Crew, list_held
from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.runtime.ports import Ports
from mlxd_shared.domain.figures import WorkerFigures, WorkerState
from tests.fakes.store import FakeStore
from tests.fakes.workers import FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.model_facts import device, facts


class _Heard(AttachedLauncher):
    """Workers that have said what they hold."""

    def __init__(self, *figures: WorkerFigures) -> None:
        super().__init__([])
        self._figures = figures

    async def wait_for_figures(self, *, wait_s: float) -> tuple[WorkerFigures, ...]:
        """Return what they hold."""
        del wait_s
        return self._figures


def crew(*figures: WorkerFigures) -> Crew:
    """A crew whose attached workers say this."""
    workers = FakeWorkers()
    ports = Ports(workers.launcher, workers.connect, FakeProbe(device(1)), FakeClock())
    return Crew(ports, None, _Heard(*figures))


def ready(digest: str, *, form_is_known: bool = True) -> WorkerFigures:
    """A worker that holds a model."""
    return WorkerFigures(
        model_digest=digest,
        context_length=512,
        rows_max=2,
        state=WorkerState.READY,
        form_is_known=form_is_known,
    )


@pytest.mark.asyncio
async def test_models_that_are_not_understood_are_left_where_they_are() -> None:
    """One that is not configured here, and forms of a later version, end no start."""
    store = FakeStore({"a": ("d", facts(10)), "b": ("e", facts(10))})
    figures = (ready("d"), ready("x"), ready("e", form_is_known=False))
    models = await list_held(crew(*figures), store)
    assert [(ref.name, spec.context_length) for ref, spec in models] == [("a", 512)]
