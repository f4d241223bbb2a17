"""Weights packed in a few bits: integers or small floats, and what each group of them is scaled by.

Invariants:
- The table `MODES` says which settings there are; any other is refused by name.
- One setting holds for all weights but those that have one of their own, or none (false).
- Which weights are packed at all is what the files say, not the config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mlxd_models.families.common.fields import Fields
from mlxd_shared.domain.requests import Weights

WORD_DTYPE = "U32"
"""What packed values are stored as, in the headers' word."""

BYTE_DTYPE = "U8"
"""What the scales of small floats are stored as: exponents, or floats of 8 bits."""

FP8_DTYPE = "F8_E4M3"
WORD_BITS = 32
BLOCK_MAX = 1 << 16

NVFP4_FULL_SCALE: Final = 448.0 * 6.0
"""What a global scale is divided by: the largest scale of a group times the largest value."""

BLOCK_SCALES: Final = "weight_scale_inv"
"""What squares are multiplied by, whatever the name says."""

_KEY = "quantization"
_COPY = "quantization_config"
"""Where newer writers repeat the setting, and other libraries describe their packing."""

_KNOWN = frozenset({"group_size", "bits", "mode"})


class PackingMode(StrEnum):
    """What a packed value is, by MLX's names where it has one."""

    AFFINE = "affine"
    """An integer, times the group's scale, plus its offset."""
    MXFP4 = "mxfp4"
    """A float of 4 bits, times a power of two."""
    MXFP8 = "mxfp8"
    """The same with 8 bits."""
    NVFP4 = "nvfp4"
    """A float of 4 bits, times one of 8, and perhaps times a scale of the whole weight."""
    FP8_BLOCKS = "fp8"
    """A float of 8 bits, times the number of its square: read so, never kept so."""


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """Which settings a mode has; the first ones where a weight's own says nothing."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]


MODES: Final[Mapping[PackingMode, ModeFacts]] = MappingProxyType(
    {
        PackingMode.AFFINE: ModeFacts((64, 32, 128), (4, 2, 3, 5, 6, 8)),
        PackingMode.MXFP4: ModeFacts((32,), (4,)),
        PackingMode.MXFP8: ModeFacts((32,), (8,)),
        PackingMode.NVFP4: ModeFacts((16,), (4,)),
    }
)


@dataclass(frozen=True, slots=True)
class Packing:
    """How many bits a value takes and how many values share a scale."""

    group_size: int
    bits: int
    mode: PackingMode = PackingMode.AFFINE
    block_rows: int = 1
    """How many rows share a scale too; one but in FP8_BLOCKS."""

    @property
    def stays(self) -> bool:
        """Whether MLX multiplies with such weights as they are."""
        return self.mode is not PackingMode.FP8_BLOCKS

    @property
    def has_offsets(self) -> bool:
        """Whether each group has an offset, and scale and offset are floats like the rows'."""
        return self.mode is PackingMode.AFFINE

    def suits(self, inputs: int) -> bool:
        """Tell whether rows of so many values can be packed like this."""
        return not self.stays or inputs % self.group_size == 0

    def words(self, inputs: int) -> int:
        """Return how many words hold a row of `inputs` values."""
        return inputs * self.bits // WORD_BITS

    def groups(self, inputs: int) -> int:
        """Return how many scales, and as many offsets, a row of `inputs` values has."""
        return -(-inputs // self.group_size)

    def nbytes(self, values: int, item_nbytes: int) -> int:
        """Return what whole groups of values take, with scales; a number takes `item_nbytes`."""
        scale_nbytes = 2 * item_nbytes if self.has_offsets else 1
        return values * self.bits // 8 + values // self.group_size * scale_nbytes


_KEPT_ENDS: Final = (
    "embed_tokens",
    "lm_head",
    *("gate", "router"),
    "norm",
    *("kv_b_proj", "embed_q", "unembed_out"),  # they make keys and values of latents
)
"""What the names of modules end with whose weights stay numbers where a load packs the others:
they are small, or an error in them is seen in every token."""

_FINER_ENDS: Final = ("k_proj", "v_proj", "down_proj")
"""What the names of modules end with that a mixed recipe gives more bits: keys and values are seen
by every later token, and what goes down is summed into the rows that all layers share."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a load packs weights that are stored in numbers."""

    common: Packing
    finer: Packing | None = None
    """What the weights of `_FINER_ENDS` become; None: what the others do."""

    def of(self, name: str, shape: Sequence[int]) -> Packing | None:
        """Return how a load packs a weight, by its name and shape; None: it stays in numbers.

        Numbers are what a checkpoint stores as floats of 8 bits or more, not yet packed.
        """
        module = name.removesuffix(".weight")
        packing = self.common
        if self.finer is not None and module.endswith(_FINER_ENDS):
            packing = self.finer
        # Experts in one tensor may be named without `.weight`; their biases are two-dimensional.
        matrix = len(shape) >= 2 if module != name else len(shape) >= 3
        if not matrix or module.endswith(_KEPT_ENDS) or not packing.suits(shape[-1]):
            return None
        return packing


ON_LOAD: Final[Mapping[Weights, Recipe]] = MappingProxyType(
    {
        Weights.Q8: Recipe(Packing(64, 8)),
        Weights.Q4: Recipe(Packing(64, 4)),
        Weights.MIXED_4_8: Recipe(Packing(64, 4), finer=Packing(64, 8)),
        Weights.MXFP8: Recipe(Packing(32, 8, PackingMode.MXFP8)),
        Weights.MXFP4: Recipe(Packing(32, 4, PackingMode.MXFP4)),
        Weights.NVFP4: Recipe(Packing(16, 4, PackingMode.NVFP4)),
    }
)
"""How weights are packed while they are loaded."""


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


def block_scales_name(weight: str) -> str:
    """Return the name of what a weight's squares are multiplied by."""
    return f"{weight.removesuffix('.weight')}.{BLOCK_SCALES}"


def parse_packing(fields: Fields) -> Packings | None:
    """Return how the weights are packed; None where the config does not say that they are."""
    if not fields.has(_KEY):
        return Packings(_read_published(fields)) if fields.has(_COPY) else None
    own = fields.part(_KEY)
    if fields.has(_COPY) and fields.values[_COPY] != own.values:
        raise fields.error(_COPY, f"contradicts {_KEY}")
    for key in ("group_size", "bits"):
        own.integer(key, low=1, high=BLOCK_MAX)
    common = _packing(own)
    single = {key: _own_packing(own, key, common) for key in own.values if key not in _KNOWN}
    return Packings(common, single)


def _own_packing(fields: Fields, stem: str, common: Packing) -> Packing | None:
    """Return one weight's setting: an object, true for the common one, or false for none.

    An object that names no mode means the affine one, whatever the common one is.
    """
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
    stated = fields.values.get("mode", PackingMode.AFFINE)
    mode = next((mode for mode in MODES if mode.value == stated), None)
    if mode is None:
        known = ", ".join(MODES)
        raise fields.error("mode", f"{stated!r} is not supported; {known} are")
    allowed = MODES[mode]
    return Packing(
        group_size=_one_of(fields, "group_size", allowed.group_sizes),
        bits=_one_of(fields, "bits", allowed.bits),
        mode=mode,
    )


def _read_published(fields: Fields) -> Packing:
    """Return the setting of a checkpoint that was not packed by MLX, by its `quant_method`."""
    own = fields.part(_COPY)
    match own.values.get("quant_method"):
        case "mxfp4":
            return Packing(32, 4, PackingMode.MXFP4)
        case "mxfp8":
            return Packing(32, 8, PackingMode.MXFP8)
        case "modelopt":
            algorithm = own.values.get("quant_algo")
            if algorithm != "NVFP4":
                raise own.error("quant_algo", f"{algorithm!r} is not supported, only 'NVFP4'")
            return Packing(_one_of(own, "group_size", (16,)), 4, PackingMode.NVFP4)
        case "fp8":
            return _fp8(own)
        case method:
            known = "fp8, modelopt, mxfp4 and mxfp8 are"
            raise own.error("quant_method", f"{method!r} is not supported; {known}")


def _fp8(fields: Fields) -> Packing:
    fields.demand("fmt", "e4m3")
    fields.demand("activation_scheme", "dynamic")
    block = fields.values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise fields.error("weight_block_size", f"{block!r} is not a list of two sizes")
    if any(type(size) is not int or not 1 <= size <= BLOCK_MAX for size in block):
        raise fields.error("weight_block_size", f"{block!r} has a size not in 1..{BLOCK_MAX}")
    return Packing(block[1], 8, PackingMode.FP8_BLOCKS, block_rows=block[0])


def _one_of(fields: Fields, key: str, allowed: tuple[int, ...]) -> int:
    value = fields.integer(key, low=min(allowed), high=max(allowed), default=allowed[0])
    if value not in allowed:
        raise fields.error(key, f"{value} is not one of {', '.join(map(str, sorted(allowed)))}")
    return value
