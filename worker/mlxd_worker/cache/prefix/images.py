"""Images in the keys of prompts: a look-up never ends within one. Pure, without MLX.

An image's places are numbers that no token has: the highest bit is set, the next one at its first
place, and the rest are bits of a hash of its name. A few of these might be another image's too;
all of them are not. So what was found ends before an image or behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import K, Key, Match, S, length, part

OF_IMAGE: Final = 1 << 31
IMAGE_BEGINS: Final = 1 << 30
VALUE_MASK: Final = IMAGE_BEGINS - 1
SCANNED_TOKENS: Final = 1024
"""That are taken out of a key at once."""


def match_whole_images(trie: PrefixTrie[K, S], key: Key, *, limit: int) -> Match[K, S]:
    """Return how far a key is in the trie, at most to `limit`, without parts of images."""
    match = trie.match(key, limit=limit)
    end = whole_images(key, match.count)
    return match if end == match.count else trie.match(key, limit=end)


def points_beside_images(key: Key, points: Iterable[int], start: int, points_max: int) -> list[int]:
    """Return points, in order, of which one within an image is both where it begins and its end.

    Left out are those that are not beyond `start` then, and those beyond the key's last token but
    one: no look-up would end there. Of more than `points_max` the last ones stay.
    """
    beside: set[int] = set()
    for point in points:
        begin = whole_images(key, point)
        beside |= {begin} if begin == point else {begin, _image_stop(key, point)}
    return sorted(point for point in beside if start < point < length(key))[-points_max:]


def whole_images(key: Key, count: int) -> int:
    """Return how many of a key's first `count` tokens there are before an image that is cut."""
    end = count
    while 0 < end < length(key):
        first = max(end + 1 - SCANNED_TOKENS, 0)
        for behind in reversed(array("I", part(key, first, end + 1))):
            if not _is_within(behind):
                return end
            end -= 1
    return max(end, 0)


def _image_stop(key: Key, point: int) -> int:
    """Return where the image ends that a point is within."""
    stop = point
    while stop < length(key):
        for number in array("I", part(key, stop, stop + SCANNED_TOKENS)):
            if not _is_within(number):
                return stop
            stop += 1
    return stop


def _is_within(number: int) -> bool:
    """Tell whether a number is an image's, but for its first."""
    return bool(number & OF_IMAGE) and not number & IMAGE_BEGINS
