"""Which layers slide and how far, from config.json: `layer_types`, or the rule of a family.

Invariants:
- A window counts the query's own position: a query at q sees (q - window, q].
- A window that is no shorter than the context is none.
- Keys that contradict each other are refused by name, for either reading would be a guess.
"""

from collections.abc import Sequence

from mlxd_models.families.common.fields import Fields
from mlxd_shared.config import CONTEXT_LENGTH_LIMIT

FULL = "full_attention"
SLIDING = "sliding_attention"
QWEN_WINDOW_DEFAULT = 4096
QWEN_WHOLE_LAYERS_DEFAULT = 28
MISTRAL_WINDOW_DEFAULT = 4096

Windows = tuple[int | None, ...]
"""One entry a layer: the positions that a query sees; None for all of them."""


def named_sliding(fields: Fields, *, layers: int) -> tuple[bool, ...] | None:
    """Return which layers `layer_types` calls sliding; None where the key is absent."""
    return fields.layers_of("layer_types", (SLIDING, FULL), layers)


def windows_of(
    fields: Fields, sliding: Sequence[bool], *, context_max: int, default: int | None = None
) -> Windows:
    """Return each layer's window; `sliding_window` is read only if a layer slides."""
    if not any(sliding):
        return (None,) * len(sliding)
    window = fields.integer("sliding_window", low=1, high=CONTEXT_LENGTH_LIMIT, default=default)
    return tuple(window if slides and window < context_max else None for slides in sliding)


def refuse_sliding(fields: Fields, *, layers: int) -> None:
    """Refuse a config that calls layers sliding where the family knows of none."""
    if any(named_sliding(fields, layers=layers) or ()):
        raise fields.error("layer_types", f"{SLIDING!r} is not supported by this architecture")


def mistral_windows(fields: Fields, *, layers: int, context_max: int) -> Windows:
    """Return the windows of a Mistral: `sliding_window` holds for all layers or for those named.

    Refused are a window that acts while no layer is to slide, and none stated where rows may
    outgrow the default.
    """
    named = named_sliding(fields, layers=layers)
    stated = fields.has("sliding_window")
    unsaid = named is None and "sliding_window" not in fields.values
    if unsaid and context_max > MISTRAL_WINDOW_DEFAULT:
        # Readers differ: it is none, or transformers' default.
        raise fields.error("sliding_window", "missing; null means that there is none")
    windows = windows_of(fields, named or (stated,) * layers, context_max=context_max)
    if named is not None and stated and not any(named):
        unnamed = windows_of(fields, (True,) * layers, context_max=context_max)
        if any(unnamed):
            raise fields.error("layer_types", f"names no {SLIDING!r}, sliding_window is there")
    return windows


def qwen_windows(fields: Fields, *, layers: int, context_max: int) -> Windows:
    """Return the windows of a Qwen2 or 3: layers from `max_window_layers` on, or those named."""
    allowed = fields.flag("use_sliding_window", default=False)
    first = QWEN_WHOLE_LAYERS_DEFAULT
    whole = fields.integer("max_window_layers", low=0, high=CONTEXT_LENGTH_LIMIT, default=first)
    sliding = named_sliding(fields, layers=layers)
    if sliding is None:
        sliding = tuple(allowed and index >= whole for index in range(layers))
    if any(sliding) and not allowed:
        raise fields.error("layer_types", "names sliding layers, use_sliding_window is not true")
    if any(sliding) and "sliding_window" in fields.values and not fields.has("sliding_window"):
        raise fields.error("sliding_window", "null, while use_sliding_window is true")
    return windows_of(fields, sliding, context_max=context_max, default=QWEN_WINDOW_DEFAULT)
