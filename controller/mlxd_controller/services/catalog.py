"""Names to models for the services: a resident model keeps its name whatever happens to its files.

The name of a resident model means that model; its files are read again only once it is unloaded. A
name is never forgotten to make room for another while its model is loaded, pinned, about to be
loaded, or in use by a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd_controller.core.phases import Resident
from mlxd_controller.runtime.ports import ModelRef, ModelStore
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.store.naming import beginning_of_digest, is_repository
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound


class Catalog:
    """The store combined with what is loaded."""

    def __init__(self, store: ModelStore, runtime: Runtime) -> None:
        self.store = store
        self._runtime = runtime
        self._kept: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def keeping(self, ref: ModelRef) -> Iterator[ModelRef]:
        """Keep a model's name from being forgotten while the body runs.

        Enter it right after `find` or `find_to_load` has returned: the name may be forgotten during
        any await in between.
        """
        mark = (ref.digest, str(ref.path))
        self._kept[mark] += 1
        try:
            yield ref
        finally:
            self._kept -= Counter([mark])  # also drops counts of 0

    async def find(self, name: str) -> ModelRef:
        """Return the model for a name, alias or digest; empty: the only one there is.

        Raises:
            ModelNotFound, InvalidModel: see the store.
            InvalidRequest: `name` is empty and there is not exactly one model; or it is too long.
        """
        if len(name) > config.MODEL_NAME_CHARS_MAX:
            raise InvalidRequest.of("model", f"at most {config.MODEL_NAME_CHARS_MAX} characters")
        name = name or self.store.only_name()
        self.store.use(name)
        return self._resident(name) or await self.store.resolve(name)

    async def find_to_load(self, model: str, *, name: str, keep: bool) -> ModelRef:
        """Return the model that a load names: like `find`, or a folder, added only with `keep`."""
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
            if "/" in model and not is_repository(model):
                hint = f"{error.hint}; a path must be absolute on the controller's machine"
                raise ModelNotFound(model, hint) from error
            raise

    async def forget(self, name: str) -> tuple[str, ...]:
        """Forget a name that a load gave, and return the folder's remaining names.

        Raises:
            ModelNotFound, InvalidRequest: see the store.
        """
        if len(name) > config.MODEL_NAME_CHARS_MAX:
            raise InvalidRequest.of("name", f"at most {config.MODEL_NAME_CHARS_MAX} characters")
        return await self.store.forget(name, in_use=self._in_use)

    def _in_use(self) -> frozenset[str]:
        return self._runtime.in_use().union(*self._kept)

    def _resident(self, name: str) -> ModelRef | None:
        beginning = beginning_of_digest(name)
        cut_short: list[ModelRef] = []
        for model in self._runtime.state.models.values():
            if not isinstance(model.phase, Resident):
                continue
            ref = self.store.find_known(model.digest)
            if ref is not None and name in (ref.digest, ref.name, *ref.aliases):
                return ref
            if ref is not None and beginning and ref.digest.startswith(beginning):
                cut_short.append(ref)
        return cut_short[0] if len(cut_short) == 1 else None
