"""What a model's headers and config.json say of its size, as far as a load's need follows.

Invariants:
- Pure but for `Division`, which is filled once: until then plans that need it say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxd_models.families.common.packing import ON_LOAD, Packing
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_models.sizes.pass_sizes import PassSizes
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.requests import Weights


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor as a load makes it; `joined` of several that are stored apart."""

    values: int
    stored_bytes: int
    joined: bool
    later_values: int = 0
    """Those of all tensors that are taken after it."""
    later_bytes: int = 0
    """The same, as they live where they live as stored."""
    kept_bytes: int | None = None
    """What it takes where it lives as stored, unless that is as many bytes as it has there."""

    def beyond_bytes(self, form_bytes: int | None) -> int:
        """Return by how much a load is beyond the finished weights while this one is made.

        There are then the tensor as it is stored, and, where it is put together, its parts in the
        form, of so many bytes a value; what is taken later is not there. None is as stored.
        """
        as_stored = self.stored_bytes if self.kept_bytes is None else self.kept_bytes
        form_nbytes = as_stored if form_bytes is None else self.values * form_bytes
        converted = 0 if form_nbytes == self.stored_bytes else self.stored_bytes
        later = self.later_bytes if form_bytes is None else self.later_values * form_bytes
        return converted + (form_nbytes if self.joined else 0) - later

    def beyond_in(self, weights: Weights, item_bytes: int) -> int:
        """Return the same by the form of the weights, and what a number takes in it."""
        if weights in ON_LOAD:  # besides what is packed, the rest is in its stored form
            return self.stored_bytes * (2 if self.joined else 1)
        return self.beyond_bytes(None if weights is Weights.STORED else item_bytes)


@dataclass(frozen=True, slots=True)
class Packable:
    """What is packed while loading in one form of weights."""

    parts: Mapping[Packing, int]
    """How many values become what."""
    unpacked_values: int
    """The most that is unpacked at once then, of these and of what is stored packed."""

    @property
    def values(self) -> int:
        """How many values are packed."""
        return sum(self.parts.values())

    def nbytes(self, item_nbytes: int) -> int:
        """Return what they take with their scales, where a number takes `item_nbytes`."""
        return sum(packing.nbytes(count, item_nbytes) for packing, count in self.parts.items())


@dataclass(frozen=True, slots=True)
class Parts:
    """What one rank has of a model, by how many share it."""

    of_ranks: Mapping[int, ModelFacts] = field(default_factory=dict)
    undivided: Mapping[tuple[int, Weights], str] = field(default_factory=dict)
    """Why so many ranks cannot share it with its weights in a form."""


class Undescribed(Exception):
    """What ranks have of a model is needed, and nobody has described it: `division` can."""

    def __init__(self, division: Division) -> None:
        super().__init__("what ranks have of a model is not described yet")
        self.division = division


class Division:
    """The parts of a model that ranks have: known, or described when a plan first needs them.

    Describing them takes as long as describing the model, several times over, and most models are
    never planned for ranks. All copies of a model's facts share one, which is filled once. Another
    process gets what is known of it alone.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        """parts: None: not known yet."""
        self._parts = parts
        self.problem = ""
        """Why it could not be described, if that was tried: no number of ranks is served then."""

    def __reduce__(self) -> tuple[type[Division], tuple[Parts | None]]:
        return Division, (None if self.problem else self._parts,)

    @property
    def described(self) -> bool:
        """Whether its parts are known, or why there are none."""
        return self._parts is not None

    @property
    def parts(self) -> Parts:
        """The parts; raises Undescribed."""
        if self._parts is None:
            raise Undescribed(self)
        return self._parts

    def fill(self, parts: Parts, *, problem: str = "") -> None:
        """Take what was described; or nothing, and why."""
        self._parts, self.problem = parts, problem

    async def describe(self) -> None:
        """Have the parts described unless they are, by whoever can read the model's files."""
        assert self.described, "whoever makes one that is not described says how"


UNDIVIDED = Division(Parts())
"""Of what no number of ranks can share."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's headers and config.json say about its size.

    `stored_bytes` is the tensors' size on disk, `elements` their number once dequantised,
    `item_bytes` the size of one stored floating-point value.
    """

    architecture: str
    stored_bytes: int
    elements: int
    item_bytes: int
    caches: CacheSizes
    passes: PassSizes
    context_length_max: int
    unpacked_values: int = 0
    """The most values of packed weights that are unpacked at once, where they stay packed."""
    tokenizer_bytes: int = 0
    """The size of tokenizer.json."""
    taken: tuple[Taken, ...] = ()
    """Tensors that a load makes, of each size the one that is made last."""
    dropped_bytes: int = 0
    """By how much less is kept than is stored, where it lives as stored: copies, and what a worker
    has no use for; below zero where 8-bit floats, which live as numbers, outweigh these."""
    packed_values: int = 0
    """Values that are stored packed."""
    packed_bytes: int = 0
    """What these take as they are stored."""
    packed_scales: int = 0
    """Scales and offsets of these that take what a number takes, where these bytes are without."""
    exact_values: int = 0
    """Values that live as float32, whatever form others live in."""
    packable: Mapping[Weights, Packable] = field(default_factory=dict)
    """What is packed while loading, where that is asked for."""
    sight: SightSizes | None = None
    """How it sees; None: it reads text alone."""
    unseeing: str = ""
    """Why, where it has a tower; empty: it sees, or has none."""
    division: Division = field(default=UNDIVIDED, compare=False, repr=False)
    """What one of several ranks has of it."""

    def of_ranks(self, ranks: int) -> ModelFacts:
        """Return the facts of what one of so many ranks has: of 1 all. Raises Undescribed."""
        return self if ranks == 1 else self.division.parts.of_ranks.get(ranks, self)

    def division_problem(self, ranks: int, weights: Weights) -> str | None:
        """Return why so many ranks cannot share it with its weights in a form, if they cannot.

        Raises:
            Undescribed: of more ranks than one, where nobody has described their parts.
        """
        if ranks == 1:
            return None
        parts = self.division.parts
        if ranks in parts.of_ranks and (ranks, weights) not in parts.undivided:
            return None
        default = self.division.problem or f"it is not divided over {ranks} ranks"
        return parts.undivided.get((ranks, weights), default)

    def unpacked_of(self, weights: Weights) -> int:
        """Return the most values that are unpacked at once in such a life."""
        if weights is Weights.STORED:
            return self.unpacked_values
        return self.packed_on_load(weights).unpacked_values

    def packed_on_load(self, weights: Weights) -> Packable:
        """Return what is packed while loading in such a life."""
        return self.packable.get(weights, Packable({}, 0))
