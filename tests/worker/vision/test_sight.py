"""Images at their places: as many tokens as a feature has rows, and keys that no text has."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_models.files.image_settings import ImageSettings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_worker.cache.prefix.images import (
    IMAGE_BEGINS,
    OF_IMAGE,
    SCANNED_TOKENS,
    whole_images,
)
from mlxd_worker.cache.prefix.trie_node import TOKEN_NBYTES, Key, key_of
from mlxd_worker.vision.sight import Sight, check_placeholder, key_of_image, place_images

SIZES = SightSizes(token_id=5, tokens=3, side=2, hidden=4, pass_values=1)
A, B = (b"a" * 32, b"pixels a"), (b"b" * 32, b"pixels b")


def test_an_image_takes_the_places_of_its_token() -> None:
    """Each in its turn; all else stays where it was, and keys differ at images alone."""
    placed = place_images([1, 5, 2, 5, 9], [A, B], SIZES)
    assert placed.ids == (1, 5, 5, 5, 2, 5, 5, 5, 9)
    assert [(image.start, image.stop, image.pixels) for image in placed.images] == [
        (1, 4, b"pixels a"), (5, 8, b"pixels b"),
    ]  # fmt: skip
    assert [key for key in placed.keys if not key & OF_IMAGE] == [1, 2, 9]
    assert placed.keys[1:4] == tuple(key_of_image(A[0], 3))
    assert set(placed.keys[1:4]).isdisjoint(placed.keys[5:8])
    assert [bool(key & IMAGE_BEGINS) for key in placed.keys[1:4]] == [True, False, False]
    assert max(placed.keys) < 1 << 32


@pytest.mark.parametrize(
    ("ids", "words"), [
        ([1, 2], "0 places for 1 images"), ([5, 5, 2], "2 places for 1 images"),
        ([1, 5], "nothing behind"),
    ],
)  # fmt: skip
def test_a_template_that_places_otherwise_is_refused(ids: list[int], words: str) -> None:
    """One place an image, and text behind the last."""
    with pytest.raises(InvalidRequest, match=words):
        place_images(ids, [A], SIZES)


def test_a_look_up_ends_at_no_part_of_an_image() -> None:
    """Whatever number of tokens was found, those of an image that is cut are not among them."""
    placed = place_images([1, 5, 5, 9], [A, B], SIZES)
    key = key_of(placed.keys)
    assert [whole_images(key, count) for count in range(9)] == [0, 1, 1, 1, 4, 4, 4, 7, 8]


class Counted(bytes):
    """A key that counts how many parts were taken out of it, and of how many tokens in all."""

    parts = tokens = 0

    def __getitem__(self, at: Any) -> Any:
        taken = super().__getitem__(at)
        self.parts += 1
        self.tokens += len(taken) // TOKEN_NBYTES
        return taken


@pytest.mark.parametrize("tokens", [1, SCANNED_TOKENS, 3 * SCANNED_TOKENS])
def test_an_image_is_walked_over_in_few_steps(tokens: int) -> None:
    """However many tokens it has, a step takes SCANNED_TOKENS, and text behind it takes one."""
    text = (7, 8)
    key = Counted(key_of((*text, *key_of_image(b"a" * 32, tokens), *text)))
    assert whole_images(Key(key), len(text) + tokens - 1) == len(text)
    assert key.parts <= -(-tokens // SCANNED_TOKENS) + 1
    assert key.tokens <= tokens + SCANNED_TOKENS
    key.parts = 0
    assert whole_images(Key(key), len(text) + tokens + 1) == len(text) + tokens + 1
    assert key.parts == 1


def test_what_stands_for_an_image_is_a_control_token() -> None:
    """Otherwise people could write it, and the model is refused."""
    plain = ImageSettings(2, None, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    check_placeholder(Sight(SIZES, plain), {5, 7})
    with pytest.raises(InvalidModel, match="no control token"):
        check_placeholder(Sight(SIZES, plain), {7})
