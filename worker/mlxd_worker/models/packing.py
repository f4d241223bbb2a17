"""Weights that MLX has packed: integers of a few bits, and a scale and an offset for each group.

Invariants:
- A packed value is `word's bits x scale + bias`, scale and bias shared by `group_size` values along
  a row (MLX's affine mode). Any other mode is refused by name.
- One setting holds for all weights but those that have one of their own, or none (false).
- No arrays and no MLX: the same facts serve the fit before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxd_worker.models.fields import Fields

WORD_DTYPE = "U32"
"""What packed values are stored as, in the headers' word."""

WORD_BITS = 32
GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)

_KEY = "quantization"
_COPY = "quantization_config"
"""Where newer writers say the same again, and other libraries something else."""

_AFFINE = "affine"
_KNOWN = frozenset({"group_size", "bits", "mode"})


@dataclass(frozen=True, slots=True)
class Packing:
    """How many bits a value takes and how many values share a scale."""

    group_size: int
    bits: int

    def suits(self, inputs: int) -> bool:
        """Tell whether rows of so many values can be packed like this."""
        return inputs % self.group_size == 0

    def words(self, inputs: int) -> int:
        """Return how many words hold a row of `inputs` values."""
        return inputs * self.bits // WORD_BITS

    def groups(self, inputs: int) -> int:
        """Return how many scales, and as many offsets, a row of `inputs` values has."""
        return inputs // self.group_size


@dataclass(frozen=True, slots=True)
class Packings:
    """How the weights of one checkpoint are packed, those that are."""

    common: Packing
    own: Mapping[str, Packing | None] = field(default_factory=dict)
    """By a weight's name without `.weight`, where it is packed otherwise or not at all."""

    def of(self, stem: str, *, inputs: int) -> Packing | None:
        """Return how a weight may be packed whose rows have `inputs` values; None: not at all."""
        packing = self.own.get(stem, self.common)
        return packing if packing is not None and packing.suits(inputs) else None


def parse_packing(fields: Fields) -> Packings | None:
    """Return how the checkpoint's weights are packed; None where it does not say that they are.

    Raises:
        InvalidModel: a setting that is not supported; names it.
    """
    if not fields.has(_KEY):
        refuse_packing(fields)
        return None
    stated = fields.values[_KEY]
    if not isinstance(stated, Mapping):
        raise fields.error(_KEY, f"{stated!r} is not an object")
    if fields.has(_COPY) and fields.values[_COPY] != stated:
        raise fields.error(_COPY, f"contradicts {_KEY}")
    own = Fields(stated, f"{fields.prefix}{_KEY}.")
    common = _packing(own)
    single = {key: _own_packing(own, key, common) for key in stated if key not in _KNOWN}
    return Packings(common, single)


def _own_packing(fields: Fields, stem: str, common: Packing) -> Packing | None:
    """Return one weight's setting: an object, true for the common one, or false for none."""
    stated = fields.values[stem]
    if isinstance(stated, bool):
        return common if stated else None
    if not isinstance(stated, Mapping):
        raise fields.error(stem, f"{stated!r} is not an object, true or false")
    own = Fields(stated, f"{fields.prefix}{stem}.")
    for key in stated:
        if key not in _KNOWN:
            raise own.error(key, "is not a setting of packed weights")
    return _packing(own)


def _packing(fields: Fields) -> Packing:
    mode = fields.values.get("mode", _AFFINE)
    if mode != _AFFINE:
        raise fields.error("mode", f"{mode!r} is not supported, only {_AFFINE!r}")
    return Packing(
        group_size=_one_of(fields, "group_size", GROUP_SIZES), bits=_one_of(fields, "bits", BITS)
    )


def refuse_packing(fields: Fields) -> None:
    """Refuse a config whose weights are packed in whatever way.

    Raises:
        InvalidModel: they are.
    """
    for key in (_KEY, _COPY):
        if fields.has(key):
            raise fields.error(key, "these quantised weights are not supported")


def _one_of(fields: Fields, key: str, allowed: tuple[int, ...]) -> int:
    value = fields.integer(key, low=allowed[0], high=allowed[-1])
    if value not in allowed:
        raise fields.error(key, f"{value} is none of {', '.join(map(str, allowed))}")
    return value
