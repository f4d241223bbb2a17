"""Models that see and that mlxd has no architecture of its own for: mlx-vlm's, over our caches.

Invariants:
- What is remembered, sizes and names of weights are seen as `models.zoo` sees them.
- No file reaches mlx-vlm: pixels come as `vision` has made them ready, and are cut into patches
  here, as the type's processor does.
- An image is seen alone, as a prompt of nothing but its places: what mlx-vlm makes of these is
  what it would make of them in any prompt, and takes their places then (`Batch.inlays`).
- Where tokens turn by three axes, each pass says where its tokens stand; what mlx-vlm keeps of a
  former pass is never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.sight_fields import COLOURS, VISION_CONFIG
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.foreign_seeing import (
    FOREIGN_SEEING,
    parse_installed_seeing,
    seeing_here,
    sight_of,
)
from mlxd_models.families.foreign_tensors import no_tensors
from mlxd_models.files.image_settings import ImageSettings
from mlxd_models.files.model_config import CONFIG_FILE
from mlxd_models.files.weights import TensorFact
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.vlm_types import VLM_TYPES, SeeingType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.base import Batch, Model, Sighted
from mlxd_worker.models.layers.patches import cut_patches, see_each
from mlxd_worker.models.vlm.peer import (
    MLX_VLM,
    hollow_seeing,
    restore_seeing,
    unpack_seeing,
    vlm_module,
)
from mlxd_worker.models.weights.lazy_tensors import LazyTensors
from mlxd_worker.models.weights.reader import Reader
from mlxd_worker.models.zoo.adapter import ZooConfig, ZooModel, settle, specs_of, zoo_footprint
from mlxd_worker.models.zoo.caches import Part, PeerCaches
from mlxd_worker.models.zoo.peer import observe_pass, without_compiling

if TYPE_CHECKING:  # see `zoo.peer`
    from mlx.nn.layers.base import Module

AXES: Final = 3
_KEPT: Final = ("_position_ids", "_rope_deltas")
"""What texts of mlx-vlm keep of the prompt they read last."""


@dataclass(frozen=True)
class VlmConfig(ZooConfig):
    """One config of mlx-vlm's, and what a hollow model of it showed."""

    @cached_property
    def sight(self) -> SightSizes:
        """How its models see."""
        return sight_of(self.values)

    @property
    def known(self) -> SeeingType:
        """What is known of its type."""
        return VLM_TYPES[self.name]


class VlmModel(ZooModel, Sighted):
    """A loaded model of mlx-vlm's. One owner: the engine thread."""

    def __init__(self, config: VlmConfig, peer: Module) -> None:
        """Own `peer`, whose weights are evaluated; see what it remembers in their type."""
        self._seeing = config
        say = partial(_say_text, peer, config.known)
        super().__init__(config, peer, caches=PeerCaches(_TextCaches()), say=say)

    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, places, hidden] of images of one shape, evaluated."""
        with without_compiling():
            return see_each(self._see_one, pixels, settings)

    def _see_one(self, image: mx.array) -> mx.array:
        peer: Any = self._peer
        config, side = self._seeing, self._seeing.sight.side
        vision = peer.config.vision_config
        patch, frames = int(vision.patch_size), vars(vision).get("temporal_patch_size")
        rows, columns = image.shape[0] // side, image.shape[1] // side
        merge = side // patch
        patches = patches_of(
            image, patch=patch, merge=merge, frames=frames or config.known.frames,
            in_rows=config.known.in_rows,
        )  # fmt: skip
        grid = mx.array([[1, rows * merge, columns * merge]])
        ids = mx.full((1, rows * columns), config.sight.token_id, dtype=mx.int32)
        made = peer.get_input_embeddings(ids, patches, image_grid_thw=grid)
        _forget(peer)
        features: mx.array = made.inputs_embeds[0]
        return features

    def _say(self, part: Part, batch: Batch, dressed: list[Any]) -> mx.array:
        embedded = _embed(self._peer, part.tokens)
        for inlay in batch.inlays:
            stop = inlay.start + inlay.rows.shape[0]
            embedded[:, inlay.start : stop] = inlay.rows.astype(embedded.dtype)
        places = places_of(part, batch) if self._seeing.known.axes else None
        return _speak(self._peer, part.tokens, embedded, dressed, places)


def patches_of(image: mx.array, *, patch: int, merge: int, frames: int, in_rows: bool) -> mx.array:
    """Return an image [height, width, 3] as patches, as processors cut it.

    in_rows: [1, patches, 3, patch, patch], row by row; else [patches, 3 * frames * patch * patch],
    the `merge` x `merge` patches of a place one after another (Qwen2-VL's processor).
    """
    if in_rows:
        cut = cut_patches(image, patch=patch, merge=1, frames=1)
        return cut.reshape(1, -1, COLOURS, patch, patch)
    return cut_patches(image, patch=patch, merge=merge, frames=frames)


def places_of(part: Part, batch: Batch) -> mx.array:
    """Return where a part's tokens stand, int32 [3, rows, width], by time, height and width."""
    turned = batch.turned
    if turned.ndim == AXES:  # a chunk that shows an image: one row
        return turned
    width = mx.arange(batch.width, dtype=mx.int32)
    places = part.take_rows(turned[:, None] + width)
    return mx.broadcast_to(places, (AXES, *places.shape))


class _TextCaches:
    """mlx-vlm's module of caches, by which the text alone remembers."""

    def __init__(self) -> None:
        self._module = vlm_module("cache")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - no types there
        """Return one of its classes."""
        return vars(self._module)[name]

    def make_prompt_cache(self, peer: Any) -> list[Any]:  # noqa: ANN401 - no types there
        """Return what mlx-vlm would remember a prompt in."""
        caches: list[Any] = self._module.make_prompt_cache(peer.language_model)
        return caches


def _embed(peer: Any, tokens: mx.array) -> mx.array:  # noqa: ANN401 - no types there
    """Return what stands for tokens [rows, width] of text, [rows, width, hidden]."""
    embedded: mx.array = peer.get_input_embeddings(tokens).inputs_embeds
    _forget(peer)
    return embedded


def _speak(
    peer: Any,  # noqa: ANN401 - no types there
    tokens: mx.array,
    embedded: mx.array,
    caches: list[Any],
    places: mx.array | None,
) -> mx.array:
    """Return the logits of tokens that something stands for."""
    where = {} if places is None else {"position_ids": places}
    said = peer.language_model(tokens, inputs_embeds=embedded, cache=caches, **where)
    logits: mx.array = said.logits
    return logits


def _say_text(
    peer: Any,  # noqa: ANN401 - no types there
    known: SeeingType,
    tokens: mx.array,
    caches: list[Any],
) -> mx.array:
    """Return the logits of a text that begins."""
    places = None
    if known.axes:
        places = mx.broadcast_to(mx.arange(tokens.shape[1], dtype=mx.int32), (AXES, *tokens.shape))
    return _speak(peer, tokens, _embed(peer, tokens), caches, places)


def _forget(peer: Any) -> None:  # noqa: ANN401 - no types there
    """Drop what a text keeps of a prompt."""
    text = peer.language_model
    for name in _KEPT:
        if name in text or name in vars(text):
            setattr(text, name, None)


def parse_vlm(config: Mapping[str, Any]) -> VlmConfig:
    """Return what mlx-vlm makes of a config; nothing is evaluated.

    Raises:
        InvalidModel: as `parse_installed_seeing`; mlx-vlm refuses the config, or a cache has no
            counterpart here.
    """
    stated = parse_installed_seeing(config)
    peer = hollow_seeing(stated.name, config)
    say = partial(_say_text, peer, VLM_TYPES[stated.name])
    leaves, logits = observe_pass(peer, PeerCaches(_TextCaches()), say, library=MLX_VLM)
    return VlmConfig(stated.name, config, stated.packings, leaves, logits.shape[-1])


def check_vlm(config: VlmConfig, facts: Sequence[TensorFact]) -> tuple[TensorSpec, ...]:
    """Return what mlx-vlm makes of the stored tensors, unread; raises as `restore_seeing`."""
    lazy = LazyTensors(facts)
    return specs_of(_restore(config, {name: lazy.pop(name) for name in list(lazy)}))


def _restore(config: VlmConfig, stored: dict[str, mx.array]) -> Module:
    return restore_seeing(config.name, config.values, stored, config.packings)


def build(config: VlmConfig, weights: Reader) -> Model:
    """Take all weights; nothing else keeps them. Raises as `restore_seeing`."""
    peer = _restore(config, weights.take_stored())
    settle(peer, weights, unpack_seeing)
    model = VlmModel(config, peer)
    _check_sees(model, config.sight)
    return model


def _check_sees(model: VlmModel, sight: SightSizes) -> None:
    """Have it see a blank image of four places: a config may name a tower that cannot.

    Raises:
        InvalidModel: it fails, or yields no features for the text.
    """
    blank = mx.zeros((1, 2 * sight.side, 2 * sight.side, COLOURS), mx.uint8)
    plain = ImageSettings(sight.side, None, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    try:
        shape = model.see(blank, plain).shape
    except Exception as error:
        raise InvalidModel(f"cannot see a blank image: {error}") from error
    if shape != (1, 4, sight.hidden):
        problem = f"an image's features are {shape[-1]} wide, and the text's rows {sight.hidden}"
        raise InvalidModel(problem, CONFIG_FILE, VISION_CONFIG)


def vlm_footprint(config: VlmConfig) -> Footprint:
    """Return what is remembered, as it was seen, and the widths that the config states."""
    return replace(zoo_footprint(config), sight=config.sight)


VLM: Final = Family(
    builder=FOREIGN_SEEING.builder,
    parse=parse_vlm,
    tensors=no_tensors,
    footprint=vlm_footprint,
    restore=check_vlm,
)


def seeing(config: Mapping[str, Any]) -> Family[Any] | None:
    """Return what serves a config that mlx-vlm sees for; None for any other (`seeing_here`)."""
    return None if seeing_here(config) is None else VLM
