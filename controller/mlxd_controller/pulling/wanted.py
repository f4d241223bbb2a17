"""What a pull asks for: a model's name on the hub, and further files; and whether it may. Pure.

Every part of a name ends up in a path of the cache, so none of them may lead out of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxd_models.files.stored_files import HUB_REPOSITORY_PREFIX
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest

MAIN = "main"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""The first one that is set counts."""
_YES = frozenset({"1", "ON", "TRUE", "YES"})
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_REVISION = re.compile(r"\w(?:[\w./-]*\w)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to pull, and where to. Those that are equal are one download."""

    repository: str
    revision: str
    cache: Path
    include: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """By which the stores know the model."""
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return self.cache / (HUB_REPOSITORY_PREFIX + self.repository.replace("/", "--"))


def wanted_of(model: str, include: Sequence[str], cache: Path) -> Wanted:
    """Return what a request for `model`, ORG/NAME or ORG/NAME@REVISION, asks for.

    The patterns of `include` are sorted, each once.

    Raises:
        InvalidRequest: names the field and the limit.
    """
    if len(model) > config.MODEL_NAME_CHARS_MAX:
        raise InvalidRequest.of("model", f"at most {config.MODEL_NAME_CHARS_MAX} characters")
    repository, at, revision = model.partition("@")
    revision = revision if at else MAIN
    bad = "--" in repository or ".." in model or "//" in revision
    if bad or not _REPOSITORY.fullmatch(repository) or not _REVISION.fullmatch(revision):
        raise InvalidRequest.of("model", f"{model!r} is not ORG/NAME or ORG/NAME@REVISION")
    if len(include) > config.PULL_PATTERNS_MAX:
        raise InvalidRequest.of("include", f"at most {config.PULL_PATTERNS_MAX} patterns")
    for index, pattern in enumerate(include):
        if not 1 <= len(pattern) <= config.PULL_PATTERN_CHARS_MAX:
            limit = f"is not 1 to {config.PULL_PATTERN_CHARS_MAX} characters"
            raise InvalidRequest.of(f"include[{index}]", limit)
    return Wanted(repository, revision, cache, tuple(sorted(set(include))))


def what_forbids(environment: Mapping[str, str]) -> str:
    """Return the variable that forbids access to a hub, as its library reads it; "" for none."""
    for name in OFFLINE_VARIABLES:
        if value := environment.get(name):
            return name if value.upper() in _YES else ""
    return ""


def is_on_a_hub(name: str) -> bool:
    """Return whether a hub may have a model of this name: ORG/NAME, or ORG/NAME@REVISION."""
    repository = name.partition("@")[0]
    return "/" in repository and _REPOSITORY.fullmatch(repository) is not None
