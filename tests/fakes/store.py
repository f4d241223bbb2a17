"""A store of made-up models: names to facts, without files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlxd_controller.runtime.ports import BrokenRef, ModelRef
from mlxd_models.fit.facts import ModelFacts
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, ModelNotFound
from mlxd_shared.domain.requests import SamplingOptions


class FakeStore:
    """Implements ports.ModelStore. Names with equal digests are one model."""

    def __init__(self, folders: Mapping[str, tuple[str, ModelFacts | MlxdError]]) -> None:
        """Take names, each with the digest and the facts of its folder, or its error."""
        self._names = {name: Path("/models") / name for name in folders}
        self._folders = {
            Path("/models") / name: model_facts for name, model_facts in folders.items()
        }
        self._refs: dict[str, ModelRef] = {}
        self._given_names: set[str] = set()
        self._listeners: list[Callable[[str], None]] = []

    def put(self, path: Path, digest: str, facts: ModelFacts | MlxdError) -> None:
        """Make a folder, or change what is in it."""
        self._folders[path] = (digest, facts)

    async def resolve(self, name: str) -> ModelRef:
        """Return the model of a name, alias or digest."""
        if name in self._names:
            return self._ref(self._names[name])
        for known in self._refs.values():
            if known.digest == name and self._folders[known.path][0] == name:
                return known
        raise ModelNotFound(name, "no such name")

    def only_name(self) -> str:
        """Return the only folder's name."""
        if len(set(self._names.values())) == 1:
            return min(self._names)
        raise InvalidRequest.of("model", f"name one: {len(self._names)} models are configured")

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return a folder's model."""
        name = self._check_name(path, name)
        digest, facts = self._folders[path]
        if isinstance(facts, MlxdError):
            raise facts
        return ModelRef(digest, name, (), path, facts, SamplingOptions())

    async def add(
        self,
        path: Path,
        *,
        name: str,
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> ModelRef:
        """Take a folder in."""
        name = (await self.inspect(path, name=name)).name
        if name not in self._names:
            self._given_names.add(name)
        self._names[name] = path
        return self._ref(path)

    def use(self, name: str) -> None:
        """Nothing: no name makes room for another."""

    async def forget(
        self, name: str, *, in_use: Callable[[], Collection[str]] = tuple
    ) -> tuple[str, ...]:
        """Forget a name that a load gave."""
        if name not in self._names:
            raise ModelNotFound(name, "no such name")
        if name not in self._given_names:
            raise InvalidRequest.of("name", f"{name!r} was there from the beginning")
        path = self._names[name]
        left = tuple(sorted({n for n, other in self._names.items() if other == path} - {name}))
        if not left and not {self._folders[path][0], str(path)}.isdisjoint(in_use()):
            problem = f"{name!r} is the only name of a model in use: unload it first"
            raise InvalidRequest.of("name", problem)
        del self._names[name]
        self._given_names.remove(name)
        for listener in self._listeners:
            listener(name)
        return left

    @contextmanager
    def telling(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Have each name that is forgotten told."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once."""
        refs: dict[str, ModelRef | BrokenRef] = {}
        for name, path in sorted(self._names.items()):
            facts = self._folders[path][1]
            if isinstance(facts, MlxdError):
                refs[name] = BrokenRef(name, path, facts)
            else:
                ref = self._ref(path)
                refs[ref.name] = ref
        return tuple(refs[name] for name in sorted(refs))

    def find_known(self, digest: str) -> ModelRef | None:
        """Return a model that was read before."""
        return self._refs.get(digest)

    def _check_name(self, path: Path, name: str) -> str:
        if path not in self._folders:
            raise ModelNotFound(str(path), "there is no such folder")
        name = name or path.name
        if self._names.get(name, path) != path:
            raise InvalidRequest.of("name", f"{name!r} is the name of another folder")
        return name

    def _ref(self, path: Path) -> ModelRef:
        digest, facts = self._folders[path]
        if isinstance(facts, MlxdError):
            raise facts
        names = sorted(n for n, other in self._names.items() if self._folders[other][0] == digest)
        ref = ModelRef(digest, names[0], tuple(names[1:]), path, facts, SamplingOptions())
        self._refs[digest] = ref
        return ref
