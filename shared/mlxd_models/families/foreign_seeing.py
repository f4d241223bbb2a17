"""Models that see and that mlx-vlm alone has a tower for, by what config.json and headers say.

Invariants:
- What mlxd lacks for a type is said by name, for who plans as for who loads.
- Towers name the same thing in several ways: the widest that is named counts. A tower is mlx-vlm's
  own and reads an image at once, all patches seeing each other: its scores grow with the square of
  their number, which `IMAGE_PLACES_ADAPTED_MAX` bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import HEADS_MAX, VOCAB_MAX, WIDTH_MAX
from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields, invalid
from mlxd_models.families.common.sight_fields import (
    COLOURS,
    FRAMES_MAX,
    MERGE_MAX,
    PLACEHOLDER,
    check_colours,
    place_token,
    tower_fields,
)
from mlxd_models.families.foreign_parts import (
    ForeignConfig,
    Library,
    check_installed,
    foreign_footprint,
    installed_version,
    keep_config,
)
from mlxd_models.families.foreign_tensors import foreign_specs, no_tensors
from mlxd_models.files.nested_text import TEXT_CONFIG
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.vlm_types import UNSERVED, VLM_EXTRA, VLM_TYPES, VLM_VERSION, vlm_type
from mlxd_models.sizes.zoo_sizes import zoo_pass_sizes
from mlxd_models.sizes.zoo_types import zoo_type
from mlxd_shared import config as bounds

MLX_VLM: Final = Library("mlx-vlm", VLM_VERSION, VLM_EXTRA)
PATCH_MAX: Final = 256
SCORES_ALIVE: Final = 3
"""Attention scores as products, exponentials and sums; on a CPU they are there once."""

ROWS_ALIVE, ROWS_ALIVE_CPU = 12, 30
"""Rows around attention, which a CPU has of more than one layer at once. Measured there: six types
of width 128, three of 256 or 512, 64 and 256 places, said to take 1.1 to 1.8 times what they do."""

_WIDTHS: Final = ("embed_dim", "hidden_size", "out_hidden_size")
_INNER: Final = ("intermediate_size",)
_HEADS: Final = ("num_heads", "num_attention_heads")
_RATIO: Final = "mlp_ratio"
_RATIO_MAX: Final = 64
_INNER_FACTOR: Final = 4
"""How much wider than itself a tower is inside where its config does not say."""


def parse_seeing(config: Mapping[str, Any]) -> ForeignConfig:
    """Return what is known of a config without mlx-vlm.

    Raises:
        InvalidModel: as `keep_config`; mlxd does not serve such a model of mlx-vlm's, or the
            config lacks a size.
    """
    name = vlm_type(config)
    if name is None:
        raise invalid("model_type", f"{config.get('model_type')!r} is not one of mlx-vlm's models")
    if name in UNSERVED:
        raise invalid("model_type", f"mlx-vlm's {name} is not served: it {UNSERVED[name]}")
    kept = keep_config(name, config)
    sight_of(config)
    return kept


def parse_installed_seeing(config: Mapping[str, Any]) -> ForeignConfig:
    """Return the same where this installation has mlx-vlm; raises as `check_installed`, too."""
    stated = parse_seeing(config)
    check_installed(MLX_VLM, stated.name, installed_version(MLX_VLM))
    return stated


def sight_of(config: Mapping[str, Any]) -> SightSizes:
    """Return how a model of a config sees; raises InvalidModel for a size that is missing."""
    fields = Fields(config)
    tower = tower_fields(fields)
    patch = tower.integer("patch_size", low=1, high=PATCH_MAX)
    merge = tower.integer("spatial_merge_size", low=1, high=MERGE_MAX)
    check_colours(tower, "in_channels", "in_chans", "num_channels")
    text = fields.part(TEXT_CONFIG) if fields.has(TEXT_CONFIG) else fields
    text.integer("hidden_size", low=1, high=WIDTH_MAX)
    text.integer("vocab_size", low=1, high=VOCAB_MAX)
    passes = zoo_pass_sizes(config)
    places = bounds.IMAGE_PLACES_ADAPTED_MAX
    return SightSizes(
        token_id=place_token(fields, PLACEHOLDER, vocab=passes.vocab),
        tokens=places,
        side=patch * merge,
        hidden=passes.hidden,
        pass_values=pass_values_of(config, places),
        settled_values=pass_values_of(config, places, on_cpu=True),
        varies=True,
    )


def pass_values_of(config: Mapping[str, Any], places: int, *, on_cpu: bool = False) -> int:
    """Return the values alive at most while an image of so many places is seen.

    Its patches beside the widest part of a layer, attention with its scores or the feed-forward,
    and the places around what merges them. Raises InvalidModel for a size that is missing.
    """
    tower, known = tower_fields(Fields(config)), VLM_TYPES[str(vlm_type(config))]
    patch = tower.integer("patch_size", low=1, high=PATCH_MAX)
    merge = tower.integer("spatial_merge_size", low=1, high=MERGE_MAX)
    frames = tower.integer("temporal_patch_size", low=1, high=FRAMES_MAX, default=known.frames)
    width = max(_sizes(tower, _WIDTHS, WIDTH_MAX))
    heads = max(_sizes(tower, _HEADS, HEADS_MAX))
    inner = max([*_read_sizes(tower, _INNER, WIDTH_MAX), _INNER_FACTOR * width])
    if tower.has(_RATIO):
        ratio = tower.positive(_RATIO)
        if ratio > _RATIO_MAX:
            raise tower.error(_RATIO, f"{ratio} is above {_RATIO_MAX}")
        inner = max(inner, int(ratio * width))
    rows = places * merge**2
    held = rows * (3 * COLOURS * frames * patch**2 + 4 * width)
    scores = (1 if on_cpu else SCORES_ALIVE) * heads * rows**2
    attention = rows * (ROWS_ALIVE_CPU if on_cpu else ROWS_ALIVE) * width + scores
    return held + max(attention, rows * 4 * inner, places * 4 * merge**2 * width)


def _read_sizes(tower: Fields, names: tuple[str, ...], most: int) -> list[int]:
    return [tower.integer(name, low=1, high=most) for name in names if tower.has(name)]


def _sizes(tower: Fields, names: tuple[str, ...], most: int) -> list[int]:
    """Return the sizes of these names, of which one at least is stated."""
    stated = _read_sizes(tower, names, most)
    if not stated:
        raise tower.error(names[-1], f"missing, and so is {', '.join(names[:-1])}")
    return stated


def seeing_footprint(config: ForeignConfig) -> Footprint:
    """Return the most that the model may take besides its weights."""
    return replace(foreign_footprint(config), sight=sight_of(config.values))


def seeing_anywhere(config: Mapping[str, Any]) -> Family[Any] | None:
    """Return what describes a config that mlx-vlm sees for, whatever is installed where it loads.

    None for what mlx-vlm sees for and mlxd does not, where mlx-lm reads its text.
    """
    name = vlm_type(config)
    return None if name is None or _reads_text_alone(name, config) else FOREIGN_SEEING


def seeing_here(config: Mapping[str, Any]) -> Family[Any] | None:
    """Return the same where workers run in this installation.

    None, too, where mlx-vlm is not installed and mlx-lm reads the text.
    """
    family = seeing_anywhere(config)
    if family is None or (installed_version(MLX_VLM) is None and zoo_type(config) is not None):
        return None
    return INSTALLED_SEEING


def _reads_text_alone(name: str, config: Mapping[str, Any]) -> bool:
    return name in UNSERVED and zoo_type(config) is not None


FOREIGN_SEEING: Final = Family(
    builder="mlxd_worker.models.vlm.adapter",
    parse=parse_seeing,
    tensors=no_tensors,
    footprint=seeing_footprint,
    restore=foreign_specs,
)
"""Whoever loads them has mlx-vlm, or not: it is in another installation."""

INSTALLED_SEEING: Final = replace(FOREIGN_SEEING, parse=parse_installed_seeing)
"""Whoever loads them is of this installation."""
