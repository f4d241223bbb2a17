"""What the Qwens that see have in common: where the text is, axes of rotation, names of tensors.

Invariants:
- Tokens turn by three axes (`RopeConfig.sections`): a text's by one number on all of them, an
  image's places by their row and column.
- Images alone: of a film nothing is known here, and a request has no field for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.rope import RopeConfig
from mlxd_models.files.nested_text import TEXT_CONFIG, text_config, text_name
from mlxd_models.sizes.weight_forms import TOWER_PREFIX

ROPE_KEYS: Final = ("rope_scaling", "rope_parameters")
Sections = tuple[int, int, int]
_STORED_TOWERS: Final = ("visual.", TOWER_PREFIX)
"""What the names of a tower's tensors begin with, as checkpoints have them."""
_TIED: Final = "tie_word_embeddings"
_KIND_KEYS: Final = ("type", "rope_type")
_SECTIONS: Final = "mrope_section"
_MIXED: Final = "mrope_interleaved"


def nested_text(architecture: str, fields: Fields) -> dict[str, Any]:
    """Return the text's part as if it stood alone: its head is tied where either part says so."""
    values = fields.values
    nested = text_config(architecture, values)
    if nested is None:
        raise fields.error(TEXT_CONFIG, "missing, or not an object")
    ties = [part.get(_TIED) for part in (values, values[TEXT_CONFIG])]
    return {**nested, _TIED: True} if True in ties else dict(nested)


def take_sections(
    text: Mapping[str, Any], default: Sections, *, mixed: bool
) -> tuple[dict[str, Any], Sections]:
    """Return a text's config as of one axis, and how many pairs turn by each of three.

    mixed: whether the model's axes take turns; a config that says otherwise is refused.
    """
    stated = [key for key in ROPE_KEYS if isinstance(text.get(key), Mapping)]
    sections = {
        key: _sections(Fields(text[key], f"{key}."), default, mixed=mixed) for key in stated
    }
    if len(set(sections.values())) > 1:
        raise Fields(text).error(ROPE_KEYS[0], f"contradicts {ROPE_KEYS[1]}")
    plain = {**text, **{key: _without_axes(text[key]) for key in stated}}
    return plain, next(iter(sections.values()), default)


def turn_by(
    text: Mapping[str, Any], rope: RopeConfig, sections: Sections, *, dims: int, mixed: bool
) -> RopeConfig:
    """Return how the first `dims` values of a head turn by three axes.

    Raises:
        InvalidModel: the sections are not their pairs, or do not find room by turns.
    """
    key = next((key for key in ROPE_KEYS if isinstance(text.get(key), Mapping)), ROPE_KEYS[0])
    turned = replace(rope, sections=sections, mixed=mixed)
    if 2 * sum(sections) != dims:
        problem = f"{list(sections)} are not the {dims // 2} pairs of a head"
        raise Fields(text).error(f"{key}.{_SECTIONS}", problem)
    if any(turned.axes.count(axis) != count for axis, count in enumerate(sections)):
        problem = f"{list(sections)} do not fit into {dims // 2} pairs by turns"
        raise Fields(text).error(f"{key}.{_SECTIONS}", problem)
    return turned


def _sections(rope: Fields, default: Sections, *, mixed: bool) -> Sections:
    """Return how many pairs turn by each axis."""
    rope.demand(_MIXED, only=mixed)
    stated = rope.values.get(_SECTIONS, default)
    if (
        not isinstance(stated, list | tuple)
        or len(stated) != len(default)
        or any(type(count) is not int or count < 1 for count in stated)
    ):
        raise rope.error(_SECTIONS, f"{stated!r} is not a number of pairs for each of three axes")
    time, height, width = stated
    return time, height, width


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary part as of a text with one axis: "mrope" alone scales nothing."""
    plain = {key: value for key, value in rope.items() if key not in (_SECTIONS, _MIXED)}
    kinds = {key: "default" for key in _KIND_KEYS if plain.get(key) == "mrope"}
    return {**plain, **kinds}


def qwen_text_name(name: str) -> str | None:
    """Return what a stored tensor of the text is called here; None for the tower's, too."""
    own = qwen_name(name)
    return None if own is None or own.startswith(TOWER_PREFIX) else own


def qwen_name(name: str) -> str | None:
    """Return what a stored tensor is called here; None for one that is left unread."""
    own = name.removeprefix("model.")
    for before in _STORED_TOWERS:
        if own.startswith(before):
            inner = own.removeprefix(before)
            return None if inner == "rotary_pos_emb.inv_freq" else TOWER_PREFIX + inner
    return text_name(name)
