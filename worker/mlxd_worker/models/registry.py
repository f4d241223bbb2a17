"""Who builds the models of which families, by the name that `Family.builder` has.

A family whose arithmetic is new is a file of its own in `families` and one line in `BUILDERS`;
one that is a Llama by another config needs neither.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.family import Family
from mlxd_worker.models.base import Model
from mlxd_worker.models.building import Builder, Weights
from mlxd_worker.models.families.latent_model import LatentModel
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.families.qwen3_5 import Qwen35Model
from mlxd_worker.models.zoo.adapter import ZOO, build_zoo

BUILDERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {
        "hybrid": Qwen35Model,
        "latent": LatentModel,
        "llama": LlamaModel,
        ZOO.builder: build_zoo,
    }
)


def build_model(
    family: Family[Any],
    config: Any,  # noqa: ANN401 - the family's own
    weights: Weights,
    *,
    builders: Mapping[str, Builder] = BUILDERS,
) -> Model:
    """Return a model of this config, which owns the weights it takes.

    Raises:
        InvalidModel: weights that are one here are stored unlike each other, or cannot be read.
    """
    return builders[family.builder](config, weights)
