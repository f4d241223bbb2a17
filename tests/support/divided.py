"""Models that ranks can share, of which nobody has described the parts; counts who does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from mlxd_controller.runtime.describing import LaterDivision
from mlxd_models.fit.facts import ModelFacts, Parts
from tests.support.model_facts import facts


@dataclass(slots=True)
class Describing:
    """What describes the parts of one model: of `mib` for each of two ranks, and half for four."""

    mib: int
    count: int = 0
    """How often they were described."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is described before it is set."""

    async def __call__(self) -> Parts:
        """Return the parts, once that is allowed."""
        self.count += 1
        await self.may_end.wait()
        return Parts({2: facts(self.mib), 4: facts(self.mib // 2)})

    def facts(self) -> ModelFacts:
        """Return the model's facts, without its parts."""
        return replace(facts(2 * self.mib), division=LaterDivision(self))
