"""From a model's description to a loaded model: every tensor is taken, or dropped by name.

Invariants:
- What is loaded is what config and headers said; a file that has changed by then is refused.
- A builder takes every required tensor of the description, and keeps nothing else of the weights.
- Builders are found by the module that a description names, which is imported for its first model.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from mlxd_models.describe import Description, describe, packings_on_load
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.packing import Recipe
from mlxd_models.families.registry import REGISTRY, Registry
from mlxd_models.files.model_source import Source
from mlxd_models.files.tensor_blobs import check_copies
from mlxd_models.fit.parts import parts_of
from mlxd_models.fit.shares import rank_config
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.models.base import Model
from mlxd_worker.models.vlm.adapter import seeing
from mlxd_worker.models.weights.direct_reading import WORDS
from mlxd_worker.models.weights.reader import Progress, Reader
from mlxd_worker.models.weights.shards import Share, share_reader
from mlxd_worker.models.zoo.adapter import ZOO

LIBRARIES = replace(ZOO, seeing=seeing)
"""Models of mlx-lm's, and of mlx-vlm's where they see."""

DTYPES = {word: dtype for dtype, word in WORDS.items()}

Builder = Callable[[Any, Reader], Model]
"""Builds a model of the config that its family parsed; takes all weights.

Raises InvalidModel where a file cannot be read after all.
"""


def builder_of(family: Family[Any]) -> Builder:
    """Return what builds a family's models."""
    return cast("Builder", importlib.import_module(family.builder).build)


def inspect_model(source: Source, *, registry: Registry = REGISTRY) -> Description:
    """Describe a model of our own families, or of mlx-lm's or mlx-vlm's where we have none.

    Blocks on the disk.

    Raises:
        InvalidModel: anything that keeps it from being served; names file and key or tensor.
    """
    return describe(source, registry=registry, foreign=LIBRARIES)


def load_model(
    files: Description,
    *,
    form: FloatType,
    progress: Progress,
    packed: bool = False,
    on_load: Recipe | None = None,
    context: int | None = None,
    share: Share | None = None,
) -> Model:
    """Read the weights in the given form and return the model; engine thread.

    packed: weights that are stored packed stay so, and `form` is what their scales become. on_load:
    how others are packed then, but for those that are kept. context: no row will be longer than
    that; None: than the model allows. share: what of the model this rank has; its `check_divides`
    has been passed. None: all of it.

    Raises:
        InvalidModel: a file changed or could not be read after all.
        Whatever `progress` raises: the load is given up and holds nothing.
    """
    check_copies(files.copies)
    reader = (Reader if share is None else share_reader(share))(
        files.facts,
        files.specs,
        dtype=DTYPES[form],
        keep_packed=packed,
        progress=progress,
        on_load={} if on_load is None else packings_on_load(files.specs, on_load),
        parts={} if share is None else parts_of(files.specs, share.rank, share.ranks),
    )
    reader.check_copies(files.specs)
    settled = files.config if context is None else files.config.within(context)
    settled = settled if share is None else rank_config(settled, share.ranks)
    model = builder_of(files.family)(settled, reader)
    reader.finish(files.specs)
    return model
