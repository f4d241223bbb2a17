"""Names to models for the services: what is resident keeps its name whatever happens to its files.

Invariants:
- A name of a resident model means that model; its files are looked at again once it is unloaded.
- An absolute path is a folder; everything else is a name, alias or digest.
- The name of a model that is loaded, pinned or about to be loaded is never forgotten for another.
"""

from __future__ import annotations

from pathlib import Path

from mlxd_controller.core.state import COLD, RESIDENT
from mlxd_controller.ports import ModelRef, ModelStore
from mlxd_controller.runtime import Runtime
from mlxd_shared import config
from mlxd_shared.errors import InvalidRequest, ModelNotFound


class Catalog:
    """The store, seen together with what is loaded."""

    def __init__(self, store: ModelStore, runtime: Runtime) -> None:
        self.store = store
        self._runtime = runtime

    async def find(self, name: str) -> ModelRef:
        """Return the model of a name, alias or digest; empty: the only one there is.

        Raises:
            ModelNotFound, InvalidModel: see the store.
            InvalidRequest: `name` is empty and there is not exactly one model, or is too long.
        """
        if len(name) > config.MODEL_NAME_CHARS_MAX:
            raise InvalidRequest.of("model", f"at most {config.MODEL_NAME_CHARS_MAX} characters")
        name = name or self.store.only_name()
        self.store.use(name)
        return self._resident(name) or await self.store.resolve(name)

    async def find_to_load(self, model: str, *, name: str, keep: bool) -> ModelRef:
        """Return the model that a load names: as `find`, or a folder's, taken in with `keep`."""
        if len(model) > config.PATH_CHARS_MAX:
            raise InvalidRequest.of("model", f"at most {config.PATH_CHARS_MAX} characters")
        if model.startswith("/"):
            if keep:
                return await self.store.add(Path(model), name=name, in_use=self._in_use)
            return await self.store.inspect(Path(model), name=name)
        if name:
            raise InvalidRequest.of("name", "goes with a path, and model is not an absolute path")
        try:
            return await self.find(model)
        except ModelNotFound as error:
            if "/" in model:
                hint = f"{error.hint}; a path must be absolute on the controller's machine"
                raise ModelNotFound(model, hint) from error
            raise

    async def forget(self, name: str) -> tuple[str, ...]:
        """Forget a name that a load gave, and return those that its folder has left.

        Raises:
            ModelNotFound, InvalidRequest: see the store.
        """
        if len(name) > config.MODEL_NAME_CHARS_MAX:
            raise InvalidRequest.of("name", f"at most {config.MODEL_NAME_CHARS_MAX} characters")
        return await self.store.forget(name, in_use=self._in_use)

    def _in_use(self) -> frozenset[str]:
        """Return the digests and paths of the models that must keep a name."""
        models = self._runtime.state.models.values()
        needed = [model for model in models if model.pinned or model.phase not in COLD]
        return frozenset(text for model in needed for text in (model.digest, model.path))

    def _resident(self, name: str) -> ModelRef | None:
        for model in self._runtime.state.models.values():
            if model.phase not in RESIDENT:
                continue
            ref = self.store.known(model.digest)
            if ref is not None and name in (ref.digest, ref.name, *ref.aliases):
                return ref
        return None
