"""What a model takes besides its weights, and how that follows from a decoder's config. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_models.sizes.pass_sizes import PassSizes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes that decide what a model takes besides its weights, in values, not bytes."""

    context_max: int
    caches: CacheSizes
    """What the layers remember, by kind."""
    passes: PassSizes
    """The widths that decide what evaluating takes."""

    @property
    def vocab(self) -> int:
        """Width of the logits."""
        return self.passes.vocab


def llama_footprint(config: DecoderConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    joined = (config.heads + 2 * config.kv_heads) * config.head_dim
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
            projected=joined,
            mlp=config.feed_width,
            heads=config.heads,
            vocab=config.vocab,
        ),
    )
