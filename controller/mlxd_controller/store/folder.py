"""A model's folder to what plans reckon with, or the reason why no worker could load it.

Invariants:
- What describes a model here describes it for the worker that loads it: what can be told without
  reading weights is refused before anybody makes room.
- No weights are read but the digest's samples: a folder of any size takes milliseconds.
- Every problem is an InvalidModel that names the file, and the key where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlxd_models.describe import describe
from mlxd_models.families.common.family import Family
from mlxd_models.families.foreign import FOREIGN
from mlxd_models.files.digest import model_digest
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.model_config import check_tokenizer_file
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.modules import check_modules
from mlxd_models.fit.described import facts_of, taken_of
from mlxd_models.fit.facts import ModelFacts
from mlxd_shared.domain.requests import SamplingOptions


@dataclass(frozen=True, slots=True)
class Folder:
    """What reading a model gave."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions


def read_folder(source: Source, *, foreign: Family[Any] = FOREIGN) -> Folder:
    """Return a model's digest and facts. Blocks on the disk.

    foreign: what describes models that mlx-lm alone has an architecture for.

    Raises:
        InvalidModel: no worker could load it: its config, generation_config.json or tensors cannot
            be served, there is no tokenizer, or a file that another one names is missing.
    """
    files = files_of(source)
    check_modules(files)
    described = describe(files, foreign=foreign)
    check_tokenizer_file(files)
    facts = replace(facts_of(described), taken=taken_of(described))
    return Folder(model_digest(files), facts, read_generation_defaults(files))
