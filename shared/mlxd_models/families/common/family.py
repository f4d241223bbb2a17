"""What one family of models hands to the registry: how to read its config, and what follows.

Invariants:
- `tensors` and `footprint` are computed from the config alone, before any weight is read.
- Every stored tensor is one of `tensors` or the file is refused; every required one is present.
- How a model is built is not known here: `builder` names the module for whoever has MLX.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlxd_models.families.common.decoder import Activation, DecoderConfig, llama_tensors
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.files.weights import TensorFact
from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_models.sizes.pass_sizes import PassSizes
from mlxd_models.sizes.sight_sizes import SightSizes

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes that decide what a model takes besides its weights, in values, not bytes."""

    context_max: int
    caches: CacheSizes
    """What the layers remember, by kind."""
    passes: PassSizes
    """The widths that decide what evaluating takes."""
    sight: SightSizes | None = None
    """How it sees; None: it reads text alone."""
    plain_matrix: int = 0
    """Values of a layer's largest matrix where all its products are plain: without a bias, gated by
    SiLU, and nothing behind them but a residual; 0 where any is not."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """One family of models under one config type."""

    builder: str
    """The module of the worker whose `build` makes its models; imported when one is loaded."""
    parse: Callable[[Mapping[str, Any]], Config]
    """Reads config.json.

    Raises InvalidModel, which names the key: one is missing, mistyped, out of range, contradicts
    another or asks for what is not supported.
    """
    tensors: Callable[[Config], tuple[TensorSpec, ...]]
    footprint: Callable[[Config], Footprint]
    model_type: str = ""
    """Where config.json has it: no other architecture of this type is left to mlx-lm."""
    name_of: Callable[[str], str | None] = str
    """By what name `tensors` knows a stored tensor; None for one that is known, and left unread."""
    restore: Callable[[Config, Sequence[TensorFact]], tuple[TensorSpec, ...]] | None = None
    """Where what is stored is read by other rules than these: checks it all, nothing being read,
    and returns what will be made of it, packed as it will be."""
    blind: Family[Any] | None = None
    """What a checkpoint is that has no tensor of the tower, as mlx-lm's converter leaves it, or no
    file that says how images are made ready: its text, which leaves a tower's tensors unread."""
    seeing: Callable[[Mapping[str, Any]], Family[Any] | None] | None = None
    """Of models that another library serves: which family serves such a config instead because it
    sees; None for one that does not."""


def llama_footprint(config: DecoderConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    per_layer = 2 * config.kv_heads * config.head_dim
    windows = Counter(window for window in config.windows if window is not None)
    return Footprint(
        context_max=config.context_max,
        caches=CacheSizes(
            kv_values_per_token=per_layer * config.windows.count(None),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            windows=tuple(
                WindowedLayers(window, per_layer * count) for window, count in windows.items()
            ),
        ),
        passes=PassSizes(
            hidden=config.hidden,
            projected=config.heads * config.head_dim + per_layer,
            mlp=config.feed_width,
            heads=config.heads,
            vocab=config.vocab,
        ),
        plain_matrix=plain_matrix_of(config),
    )


def plain_matrix_of(config: DecoderConfig) -> int:
    """Return `Footprint.plain_matrix` of a Llama-like decoder."""
    biased = config.qkv_bias or config.output_bias or config.mlp_bias
    other = config.experts is not None or config.activation is not Activation.SILU
    if biased or other or config.output_norms:
        return 0
    projected = (config.heads + 2 * config.kv_heads) * config.head_dim
    return config.hidden * max(projected, 2 * config.mlp)


def llama_family(
    parse: Callable[[Mapping[str, Any]], DecoderConfig],
    model_type: str = "",
    *,
    tensors: Callable[[DecoderConfig], tuple[TensorSpec, ...]] = llama_tensors,
    name_of: Callable[[str], str | None] = str,
) -> Family[DecoderConfig]:
    """Return a family whose models are Llamas by another config."""
    builder = "mlxd_worker.models.families.llama"
    return Family(builder, parse, tensors, llama_footprint, model_type, name_of)
