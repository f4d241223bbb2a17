"""What the tests of the prefix trie stand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.plugins.leaks import Counting
from tests.worker.cache.trie_model import Kind, Stand


@pytest.fixture
def stand(watched: Callable[[Counting], None]) -> Iterator[Stand]:
    """Give a trie of a model whose layers can all be cut; nothing of it may leak."""
    yield from empty_stand(Stand(), watched)


@pytest.fixture
def hybrid(watched: Callable[[Counting], None]) -> Iterator[Stand]:
    """Give a trie of a model that has recurrent layers too."""
    yield from empty_stand(Stand(Kind.STANDARD, Kind.RECURRENT), watched)


@pytest.fixture
def short(watched: Callable[[Counting], None]) -> Iterator[Stand]:
    """Give a trie whose edges have at most 16 tokens."""
    yield from empty_stand(Stand(edge_tokens=16), watched)


def empty_stand(stand: Stand, watched: Callable[[Counting], None]) -> Iterator[Stand]:
    """Give a trie to a test and clear it afterwards: then nothing may be left."""
    watched(stand.book)
    yield stand
    stand.trie.clear()
