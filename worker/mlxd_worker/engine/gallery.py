"""The images of rows' prompts, seen once: features by name, kept within a budget.

Invariants:
- An image is seen when a pass is about to read a place of it, at most IMAGES_TOGETHER_MAX at once,
  whoever's they are, and alone where it keeps its shape or on a CPU; the same image of two rows
  once.
- Features are kept for the next chunk, and for the next prompt that shows the same image: of
  IMAGE_FEATURES_KEPT_MAX images, the one used longest ago going first, and before new ones are
  made: no more are held at any time, but for those of one pass. What is gone is seen again, from
  the pixels that the row has: nothing of a stream depends on what is kept.
- Each image's features are an array of their own, so that the ledger counts every byte once.
- Engine thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxd_models.files.image_settings import ImageSettings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared import config
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.row import Row
from mlxd_worker.models.base import Inlay, Sighted


class Gallery:
    """What one model has seen. One owner: the engine thread."""

    def __init__(
        self,
        model: Sighted,
        sizes: SightSizes,
        settings: ImageSettings,
        *,
        kept_max: int = config.IMAGE_FEATURES_KEPT_MAX,
        on_cpu: bool = True,
    ) -> None:
        """Keep nothing yet."""
        self._together = sizes.together_on(on_cpu=on_cpu)
        self._model = model
        self.sizes = sizes
        self._settings = settings
        self._kept_max = kept_max
        self._features: OrderedDict[bytes, mx.array] = OrderedDict()
        """By the image's name, [tokens, (1 + levels) * hidden], the one used last at the end."""
        self.seen = 0
        """How many images the tower has evaluated."""

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what is kept, for the ledger."""
        return {name.hex(): features for name, features in self._features.items()}

    def inlays_of(self, chunks: Sequence[tuple[Row, Sequence[int]]]) -> tuple[Inlay, ...]:
        """Return the features at the places of a pass over rows' next tokens; all are evaluated."""
        shown: list[tuple[Image, int, int, int]] = []
        first = 0
        for row, tokens in chunks:
            stop = row.offset + len(tokens)
            for image in row.request.images:
                begin, end = max(image.start, row.offset), min(image.stop, stop)
                if begin < end:
                    place = first + begin - row.offset
                    shown.append((image, place, begin - image.start, end - image.start))
            first += len(tokens)
        features = self._look({image.name: image for image, *_ in shown})
        inlays = tuple(
            Inlay(place, features[image.name][begin:end]) for image, place, begin, end in shown
        )
        self._drop_oldest(self._kept_max)
        return inlays

    def warm_up(self) -> None:
        """See a blank image, so that no request pays for what a device compiles."""
        sizes, grid = self.sizes, (2, 2)
        tokens = grid[0] * grid[1] if sizes.varies else sizes.tokens
        blank = bytes(sizes.nbytes_of(tokens))
        self._see([Image(b"", 0, tokens, blank, grid if sizes.varies else None)])
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._features.clear()

    def _look(self, images: Mapping[bytes, Image]) -> Mapping[bytes, mx.array]:
        """Return the features of images, of which those that are not kept are seen now."""
        new = [image for name, image in images.items() if name not in self._features]
        for name in images.keys() & self._features.keys():
            self._features.move_to_end(name)
        self._drop_oldest(max(self._kept_max - len(new), len(images) - len(new)))
        for at in range(0, len(new), self._together):
            self._see(new[at : at + self._together])
        return {name: self._features[name] for name in images}

    def _see(self, images: Sequence[Image]) -> None:
        height, width = (self.sizes.side * count for count in images[0].grid or (1, 1))
        alone = images[0].pixels if len(images) == 1 else None
        joined = memoryview(b"".join(image.pixels for image in images) if alone is None else alone)
        pixels = mx.array(joined)  # type: ignore[arg-type]  # MLX reads any buffer
        features = self._model.see(pixels.reshape(-1, height, width, 3), self._settings)
        for index, image in enumerate(images):
            # A gather: a slice would keep the features of all of them alive.
            self._features[image.name] = kept = mx.take(features, mx.array(index), axis=0)
            mx.eval(kept)
        self.seen += len(images)

    def _drop_oldest(self, left: int) -> None:
        """Forget all but so many, which were used last."""
        while len(self._features) > left:
            self._features.popitem(last=False)
