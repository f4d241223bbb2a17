"""Prompts that memory is about to let go: named block by block, so that no step waits for many.

Invariants:
- Naming a prompt hashes all of its tokens. A call names at most as many blocks as it is told to,
  however many prompts wait and however long they are.
- Prompts are named in the order in which they were noted; one that waits keeps its place. At most
  `WAITING_MAX` wait: the next row that leaves notes the others again.
- Keys are taken when a prompt is noted: what is evicted meanwhile is named in vain, and no more.
- Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mlxd_shared.blocks.chain import names_of
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.prefix.trie_node import TOKEN_NBYTES, Key, Node

WAITING_MAX: Final = 32

NAMED_MAX: Final = 16
"""Blocks that are named in a step: of 256 tokens each, 16 KiB are hashed, in some 20 us."""


@dataclass(slots=True)
class Doomed:
    """A prompt, and the names of its first blocks."""

    key: Key
    names: list[bytes] = field(default_factory=list)


class DoomedPrompts:
    """The prompts that wait to be named. One owner: the engine thread."""

    def __init__(self, form_name: bytes, *, block_tokens: int, name_key: bytes = b"") -> None:
        """Name blocks of so many tokens after `form_name`, each after the one before.

        name_key: what names are made under; see `chain`.
        """
        self._form_name = form_name
        self._name_key = name_key
        self._block_tokens = block_tokens
        self._waiting: dict[Node[Kind, Snapshot], Doomed] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, node: Node[Kind, Snapshot]) -> None:
        """Have the prompt that ends with a node named, in its turn."""
        if node not in self._waiting and len(self._waiting) < WAITING_MAX:
            self._waiting[node] = Doomed(node.key())

    def clear(self) -> None:
        """Forget all that wait."""
        self._waiting.clear()

    def advance(self, blocks_max: int = NAMED_MAX) -> Doomed | None:
        """Name at most so many more blocks of the first prompt; return it once it is whole."""
        if not self._waiting:
            return None
        node, doomed = next(iter(self._waiting.items()))
        block_nbytes = self._block_tokens * TOKEN_NBYTES
        start = len(doomed.names) * block_nbytes
        before = doomed.names[-1] if doomed.names else self._form_name
        some = doomed.key[start : start + blocks_max * block_nbytes]
        doomed.names += names_of(
            before, some, block_tokens=self._block_tokens, name_key=self._name_key
        )
        if len(doomed.names) < len(doomed.key) // block_nbytes:
            return None
        del self._waiting[node]
        return doomed
