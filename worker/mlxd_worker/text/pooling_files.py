"""How a model's texts become vectors, where its files say so: those of sentence-transformers.

Sources, first that says it wins
- the pooling: the mode of 1_Pooling/config.json, wherever modules.json has it; else the last token;
- whether vectors are scaled to length 1: whether modules.json ends with such a module, else yes.

Invariants:
- What is not served is told by name to who asks for vectors and leaves the pooling open, and to
  nobody else: the model generates all the same. A file that is named and missing is another matter:
  that model is not whole, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.modules import (
    MODULES_FILE,
    POOLING,
    POOLING_FILE,
    POOLING_FOLDER,
    Module,
    check_modules,
    read_modules,
)
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import EmbedSpec, Pooling

_SERVED: Final = frozenset({"Transformer", POOLING, "Normalize"})
_MODE: Final = "pooling_mode"
_MEAN_FLAG: Final = "pooling_mode_mean_tokens"
_MODES: Final[Mapping[str, Pooling]] = MappingProxyType(
    {
        _MEAN_FLAG: Pooling.MEAN,
        "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
        "mean": Pooling.MEAN,
        "lasttoken": Pooling.LAST_TOKEN,
    }
)


@dataclass(frozen=True, slots=True)
class EmbedDefaults:
    """What holds where a request leaves it open."""

    pooling: Pooling = Pooling.LAST_TOKEN
    normalize: bool = True
    problem: InvalidModel | None = None
    """Why there is no such thing for the pooling."""

    def pooling_of(self, spec: EmbedSpec) -> Pooling:
        """Return a request's pooling; raises InvalidModel if the model's own is not served."""
        if spec.pooling is None and self.problem is not None:
            raise InvalidModel(self.problem.problem, self.problem.file, self.problem.field)
        return spec.pooling or self.pooling

    def normalizes(self, spec: EmbedSpec) -> bool:
        """Return whether a request's vectors are scaled to length 1."""
        return self.normalize if spec.normalize is None else spec.normalize


def read_embed_defaults(source: Source) -> EmbedDefaults:
    """Return what a model's files say about vectors. Blocks on the disk.

    Raises:
        InvalidModel: a file that they name is missing, or a link that cannot be followed.
    """
    files = files_of(source)
    check_modules(files)
    try:
        modules = read_modules(files)
        kinds = None if modules is None else [_check_served(module) for module in modules]
        normalize = kinds is None or "Normalize" in kinds
        pools = kinds is None or POOLING in kinds
        if not pools or files.path_of(POOLING_FILE) is None:
            return EmbedDefaults(normalize=normalize)
        return EmbedDefaults(_pooling(files.read_json(POOLING_FILE)), normalize)
    except InvalidModel as error:
        return EmbedDefaults(problem=error)


def _check_served(module: Module) -> str:
    """Return a module's kind, if it is served from where it is."""
    if module.kind not in _SERVED:
        problem = f"a module {module.kind} ({module.path}) is not served"
        raise InvalidModel(problem, MODULES_FILE, "type")
    if module.kind == POOLING and module.path != POOLING_FOLDER:
        problem = f"its pooling is in {module.path!r}; read from {POOLING_FOLDER} alone"
        raise InvalidModel(problem, MODULES_FILE, "path")
    return module.kind


def _pooling(settings: Mapping[str, Any]) -> Pooling:
    named = settings.get(_MODE)
    if named is not None:
        modes = [named]
    else:
        modes = [
            key
            for key, value in settings.items()
            if key.startswith(f"{_MODE}_") and value is not False
        ]
        if not modes and _MEAN_FLAG not in settings:
            modes = [_MEAN_FLAG]
    if len(modes) != 1:
        problem = "several at once are not served" if modes else "none is chosen"
        raise InvalidModel(problem, POOLING_FILE, _MODE)
    pooling = _MODES.get(modes[0]) if isinstance(modes[0], str) else None
    if pooling is None:
        problem = f"{modes[0]!r} is not served for a model that reads from left to right"
        raise InvalidModel(problem, POOLING_FILE, _MODE)
    return pooling
