"""The stores that a server uses, in the order of their claim to names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.hub import HubShelf
from mlxd_controller.store.load_defaults import LoadDefaults
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.models_dir import ModelsShelf
from mlxd_controller.store.ollama import OllamaShelf
from mlxd_controller.store.remembered import RememberedNames
from mlxd_controller.store.shelf import Shelf
from mlxd_models.families.foreign import FOREIGN, INSTALLED

DEMO_NAME = "demo"


def demo_model() -> Path:
    """Return the folder of the model that comes with mlxd."""
    return Path(str(resources.files("mlxd_shared") / "demo_model"))


def shelves_of(places: StorePlaces) -> list[Shelf]:
    """Return the stores in use, in the order of their claim to names."""
    kinds: tuple[tuple[Callable[[Path], Shelf], Path | None], ...] = (
        (ModelsShelf, places.models_dir), (HubShelf, places.hub_cache), (OllamaShelf, places.ollama)
    )  # fmt: skip
    return [make(root) for make, root in kinds if root is not None]


def library_of(
    models: Iterable[tuple[str, Path]],
    places: StorePlaces,
    *,
    launches: bool = True,
    load_defaults: LoadDefaults = MappingProxyType({}),
) -> Library:
    """Return the named models, and those of the stores.

    launches: workers run in this installation, so that they lack what it lacks. load_defaults: the
    configured defaults for loads.

    Raises:
        InvalidRequest, QueueFull: see Library.
    """
    foreign = INSTALLED if launches else FOREIGN
    return Library(
        models,
        shelves_of(places),
        aliases=places.models_dir,
        remembered=RememberedNames(places.models_dir),
        load_defaults=load_defaults,
        foreign=foreign,
    )
