"""How a model's processor makes an image ready to be seen, as its files say.

Sources, first that is there
- preprocessor_config.json;
- processor_config.json: its `image_processor`.

Invariants:
- A setting that would change pixels is honoured or refused by name; it is never ignored.
- What comes out is a square of the side that the model's tower has: another one is refused. Or an
  image keeps its shape: both sides become multiples of that, within the pixels that are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared.domain.errors import InvalidModel

IMAGE_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
_WITHIN: Final = "image_processor"
NOT_STATED: Final = f"{IMAGE_FILE} is missing, which says how they are made ready"
"""Of images: why a model that has a tower does not see them."""
_KINDS: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "CLIPImageProcessor": True,
        "LlavaImageProcessor": True,
        "SiglipImageProcessor": False,
        "Gemma3ImageProcessor": False,
    }
)
"""Processors that are known, and whether a size that is one number is the shorter side's."""
_PANNING: Final = "Gemma3ImageProcessor"
"""The one that may cut an image into several, and says how many places each takes."""
_PATCH, _MERGE, _FRAMES = 14, 2, 2


class Growth(StrEnum):
    """How an image with a side that is shorter than a place has grows first, keeping its shape."""

    NOT = "not"
    WHOLE = "whole"
    """Until both sides have that many pixels, cut to whole ones."""
    BY_SIDE = "by side"
    """First its height, then its width, the other side being rounded."""


@dataclass(frozen=True, slots=True)
class _Shaping:
    """One processor of images that keep their shape."""

    pixels_min: int
    """What its files may leave out, as the next."""
    pixels_max: int
    growth: Growth = Growth.NOT
    counts_frames: bool = False
    """Whether these are pixels of all frames, of which an image has `temporal_patch_size`."""


_GLM: Final = _Shaping(112 * 112, 28 * 28 * 15_000, Growth.WHOLE, counts_frames=True)
_SHAPED: Final[Mapping[str, _Shaping]] = MappingProxyType(
    {
        "Qwen2VLImageProcessor": _Shaping(56 * 56, 28 * 28 * 1280),
        "Glm4vImageProcessor": _GLM,
        "Glm46VImageProcessor": _GLM,
        "PaddleOCRVLImageProcessor": _Shaping(384 * 384, 1536 * 1536, Growth.BY_SIDE),
    }
)
"""The processors of images that keep their shape."""
_BACKENDS: Final = ("Fast", "Pil")
_RESAMPLE_MAX: Final = 5
_BILINEAR, _BICUBIC = 2, 3
_Colours = tuple[float, float, float]
_HALVES: Final = (0.5, 0.5, 0.5)
_HALVES_BOTH: Final = (_HALVES, _HALVES)
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's own, which its processor's files may leave out."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How pixels are made: resized, the middle cut out, then scaled and shifted."""

    side: int
    """Of what comes out, in pixels; what both sides are multiples of where it keeps its shape."""
    shorter_side: int | None
    """What the shorter side becomes before the middle is cut out; None: both become `side`."""
    resample: int
    """Pillow's number of the filter."""
    scale: float
    """What 8-bit values are multiplied by."""
    mean: tuple[float, float, float]
    """What is subtracted then, of each colour."""
    deviation: tuple[float, float, float]
    """What is divided by at last."""
    pixels_min: int | None = None
    """How many pixels an image that keeps its shape has at least; None: all become squares."""
    pixels_max: int | None = None
    """How many it has at most."""
    growth: Growth = Growth.NOT
    """What becomes of one that keeps its shape and is too narrow for a place."""


def unseen(model: str, unseeing: str) -> str:
    """Return why images are refused by a model that does not see; `unseeing` as a description's."""
    why = f"{model} does not see images"
    return f"{why}: {unseeing}" if unseeing else why


def states_images(source: Source) -> bool:
    """Return whether a file says how images are made ready; raises InvalidModel for a broken one.

    A model with a tower is served as its text where none does and the text can stand alone.
    """
    return _find_values(files_of(source)) is not None


def _find_values(files: StoredFiles) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file that says how images are made ready, and what it says; None for none."""
    values = files.read_json(IMAGE_FILE)
    if values:
        return IMAGE_FILE, values
    inner = files.read_json(PROCESSOR_FILE).get(_WITHIN)
    return (PROCESSOR_FILE, inner) if isinstance(inner, dict) else None


def read_image_settings(
    source: Source, *, side: int, places_max: int | None = None, tokens: int | None = None
) -> ImageSettings:
    """Return how images become squares of `side` pixels.

    places_max: where they keep their shape and become several, how many at most. tokens: what an
    image takes in a prompt, where the files may say it too.

    Raises:
        InvalidModel: no file says how, or it says what is not supported, or another side; names
            the file and the key.
    """
    files = files_of(source)
    stated = _find_values(files)
    if stated is None:
        problem = f"missing, and {PROCESSOR_FILE} has no {_WITHIN}: the model sees, and no file"
        raise InvalidModel(f"{problem} says how images are made ready", IMAGE_FILE)
    file, values = stated
    reading = _Reading(file, values, side, tokens)
    if file != PROCESSOR_FILE and reading.pans:
        _Reading(PROCESSOR_FILE, files.read_json(PROCESSOR_FILE), side, tokens).check_places()
    return reading.settings() if places_max is None else reading.read_shaped(places_max)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One file's object."""

    file: str
    values: Mapping[str, Any]
    side: int
    tokens: int | None

    def settings(self) -> ImageSettings:
        """Return what the file says."""
        by_shorter = self._kind()
        self._check_switches()
        if self.pans:
            self._check_panning()
        crops = self._flag("do_center_crop", default=by_shorter)
        shorter = self._shorter_side(by_shorter=by_shorter)
        if crops:
            self._check_square("crop_size", self.values.get("crop_size", self.side))
        if shorter is not None and (not crops or shorter < self.side):
            raise self._error("size", f"a shorter side of {shorter} gives no square of {self.side}")
        return self._settings(shorter, plain=(_MEAN, _DEVIATION) if by_shorter else _HALVES_BOTH)

    def read_shaped(self, places_max: int) -> ImageSettings:
        """Return what the file says of images that keep their shape."""
        shaping = _SHAPED.get(self._name())
        if shaping is None:
            named, kinds = self.values.get("image_processor_type"), ", ".join(_SHAPED)
            raise self._error("image_processor_type", f"{named!r} is not one of {kinds}")
        self._check_switches()
        if self._flag("do_center_crop", default=False):
            raise self._error("do_center_crop", "true is not supported")
        patch, merge = self._whole("patch_size", _PATCH), self._whole("merge_size", _MERGE)
        if patch * merge != self.side:
            problem = f"{merge} patches of {patch} pixels are not the {self.side} that a place has"
            raise self._error("patch_size", problem)
        size = self.values.get("size")
        stated = {} if size is None else size
        known = {"shortest_edge", "longest_edge"}
        if not isinstance(stated, dict) or {key for key in stated if stated[key]} - known:
            raise self._error("size", f"{size!r} is not a shortest_edge and a longest_edge")
        least = self._whole("min_pixels", stated.get("shortest_edge") or shaping.pixels_min)
        most = self._whole("max_pixels", stated.get("longest_edge") or shaping.pixels_max)
        if least > most:
            raise self._error("min_pixels", f"{least} is above max_pixels {most}")
        if shaping.counts_frames:
            frames = self._whole("temporal_patch_size", _FRAMES)
            if least % frames or most % frames:
                problem = f"{frames} frames do not divide {least} and {most} pixels"
                raise self._error("temporal_patch_size", problem)
            least, most = least // frames, most // frames
        bound = places_max * self.side**2
        settings = self._settings(None, plain=(_MEAN, _DEVIATION))
        return replace(
            settings,
            pixels_min=min(least, bound),
            pixels_max=min(most, bound),
            growth=shaping.growth,
        )

    def _settings(self, shorter: int | None, *, plain: tuple[_Colours, _Colours]) -> ImageSettings:
        """Return the settings; `plain` is what the processor subtracts and divides by itself."""
        rescales, normalises = self._flag("do_rescale"), self._flag("do_normalize")
        return ImageSettings(
            side=self.side,
            shorter_side=shorter,
            resample=self._resample(),
            scale=self._number("rescale_factor", 1 / 255) if rescales else 1.0,
            mean=self._colours("image_mean", plain[0]) if normalises else (0.0, 0.0, 0.0),
            deviation=self._colours("image_std", plain[1]) if normalises else (1.0, 1.0, 1.0),
        )

    def _name(self) -> str:
        name = str(self.values.get("image_processor_type") or "CLIPImageProcessor")
        for backend in _BACKENDS:
            name = name.removesuffix(backend)
        return name

    def _check_switches(self) -> None:
        for key in ("do_resize", "do_convert_rgb"):
            if not self._flag(key, default=True):
                raise self._error(key, "false is not supported")
        if self._flag("do_pad", default=False):
            raise self._error("do_pad", "true is not supported")

    def _check_panning(self) -> None:
        """Refuse crops beside the image, and another number of places than the model has."""
        if self._flag("do_pan_and_scan", default=False):
            raise self._error("do_pan_and_scan", "true is not supported")
        self.check_places()

    @property
    def pans(self) -> bool:
        """Whether its processor is the one that may cut an image into several."""
        return self._name() == _PANNING

    def check_places(self) -> None:
        """Refuse another number of places than the model has; either file may state it."""
        key = "image_seq_length"
        if self.tokens is not None and self._whole(key, self.tokens) != self.tokens:
            problem = f"{self.values[key]!r} is not the {self.tokens} of the model's config"
            raise self._error(key, problem)

    def _kind(self) -> bool:
        name = self._name()
        if name not in _KINDS:
            stated, known = self.values["image_processor_type"], ", ".join(_KINDS)
            raise self._error("image_processor_type", f"{stated!r} is not one of {known}")
        return _KINDS[name]

    def _shorter_side(self, *, by_shorter: bool) -> int | None:
        """Return what the shorter side becomes; None where both become the side that is wanted."""
        size = self.values.get("size")
        if size is None:
            raise self._error("size", "missing")
        if isinstance(size, dict) and set(size) == {"shortest_edge"}:
            size, by_shorter = size["shortest_edge"], True
        if by_shorter and type(size) is int:
            if not 1 <= size <= 16 * self.side:
                raise self._error("size", f"{size} is not in 1..{16 * self.side}")
            return size
        self._check_square("size", size)
        return None

    def _check_square(self, key: str, stated: object) -> None:
        if stated not in (self.side, {"height": self.side, "width": self.side}):
            problem = f"{stated!r} is not the {self.side} pixels that the model's tower has"
            raise self._error(key, problem)

    def _resample(self) -> int:
        default = _BILINEAR if self._name() == _PANNING else _BICUBIC
        stated = self.values.get("resample", default)
        if type(stated) is not int or not 0 <= stated <= _RESAMPLE_MAX:
            raise self._error("resample", f"{stated!r} is not in 0..{_RESAMPLE_MAX}")
        return stated

    def _flag(self, key: str, *, default: bool = True) -> bool:
        stated = self.values.get(key)
        stated = default if stated is None else stated
        if type(stated) is not bool:
            raise self._error(key, f"{stated!r} is not true or false")
        return stated

    def _whole(self, key: str, default: int) -> int:
        stated = self.values.get(key)
        stated = default if stated is None else stated
        if type(stated) is not int or stated < 1:
            raise self._error(key, f"{stated!r} is not a number from 1 up")
        return stated

    def _number(self, key: str, default: float) -> float:
        stated = self.values.get(key, default)
        if type(stated) not in (int, float) or not 0 < stated <= 1:
            raise self._error(key, f"{stated!r} is not a number in (0, 1]")
        return float(stated)

    def _colours(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        stated = self.values.get(key)
        stated = default if stated is None else stated
        if not isinstance(stated, list | tuple) or len(stated) != len(default):
            raise self._error(key, f"{stated!r} is not a number for each of three colours")
        for number in stated:
            if (
                type(number) not in (int, float)
                or not 0 <= number <= 255
                or not (number or key == "image_mean")
            ):
                raise self._error(key, f"{number!r} is out of range")
        red, green, blue = (float(number) for number in stated)
        return red, green, blue

    def _error(self, key: str, problem: str) -> InvalidModel:
        return InvalidModel(problem, self.file, key)
