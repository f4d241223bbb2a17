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


def match_whole_images(trie: PrefixTrie[K, S], key: Key, *, limit: int) -> Match[K, S]:
    """Return how far a key is in the trie, at most to `limit`, without parts of images."""
    match = trie.match(key, limit=limit)
    end = whole_images(key, match.count)
    return match if end == match.count else trie.match(key, limit=end)


def points_beside_images(key: Key, points: Iterable[int], start: int) -> list[int]:
    """Return points, in order, of which those within an image are where it begins.

    Those that are not beyond `start` then are left out: no look-up would end there.
    """
    return sorted({end for point in points if (end := whole_images(key, point)) > start})


def whole_images(key: Key, count: int) -> int:
    """Return how many of a key's first `count` tokens there are before an image that is cut."""
    end = count
    while 0 < end < length(key):
        (behind,) = array("I", part(key, end, end + 1))
        if not behind & OF_IMAGE or behind & IMAGE_BEGINS:
            return end
        end -= 1
    return end
