"""What a router's door is a client of. It needs no extra, so that the controller can name it."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_controller.runtime.ports import Clock
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.inference import InferenceService
from mlxd_controller.services.models import ModelService


@dataclass(frozen=True, slots=True)
class Services:
    """The controller's own, which do the work."""

    catalog: Catalog
    inference: InferenceService
    models: ModelService
    runtime: Runtime
    clock: Clock
