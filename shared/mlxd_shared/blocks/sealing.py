"""Encryption of blocks at rest: AES-256-GCM under a key that only its user has.

Invariants:
- A sealed file is a head (what it is, which key, nonce), the encrypted bytes of a block's file, and
  a tag. The tag covers every bit of it, and the place where it stands: the names of its folder and
  of the file, which say form, block, depth and part. What was changed, renamed or moved is no
  block, and nothing of it is parsed.
- Each file has a nonce of its own, 96 bits from the system's generator. Of n files two have one
  with a chance of n^2 / 2^97: a disk that is written at 1 GB/s, in files of 2 MiB, for a year makes
  2^34 of them, and 1 in 700 million. There is no counter, which a copied disk would set back.
- A key is never used itself: the cipher's key, the names' and the key's own name are hashes of it,
  and none of them tells another.
- Bytes are encrypted as they are written and decrypted as they are read, a chunk at a time: a file
  needs no second copy, and no thread waits longer for the interpreter than a chunk takes.
- What is in the clear: how large files are, when they were used, how many there are, how deep in
  its prompt each stands, and what a folder says of its model (`about`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Final

from mlxd_shared.blocks.block_file import BlockRefused, Fault

KEY_NBYTES: Final = 32
ID_NBYTES: Final = 16
NONCE_NBYTES: Final = 12
TAG_NBYTES: Final = 16
MAGIC: Final = b"mlxd sealed 1\n\0\0"
HEAD_NBYTES: Final = len(MAGIC) + ID_NBYTES + NONCE_NBYTES
SEAL_NBYTES: Final = HEAD_NBYTES + TAG_NBYTES
"""By how much a sealed file is larger than what it holds."""

CHUNK_NBYTES: Final = 1 << 18
"""It and what it becomes are in a core's own cache; some 0.1 ms."""

Fill = Callable[[memoryview], None]


class DiskKey:
    """What blocks are encrypted with. It prints as nothing. Needs the extra `cipher`."""

    __slots__ = ("_cipher_key", "id", "name_key")

    def __init__(self, secret: bytes) -> None:
        """Take `KEY_NBYTES` random bytes."""
        assert len(secret) == KEY_NBYTES, "whoever reads a key checks that"
        self._cipher_key = _derive(secret, b"mlxd blocks")
        self.name_key = _derive(secret, b"mlxd names")
        """What names of blocks are made under; see `chain`."""
        self.id = _derive(secret, b"mlxd key")[:ID_NBYTES]
        """Its name, which anybody may know."""

    def __repr__(self) -> str:
        """Say nothing of the value."""
        return "DiskKey(...)"

    def seal(self, pieces: Iterable[bytes | memoryview], *, place: str) -> Iterator[bytes]:
        """Yield the bytes of a sealed file that holds `pieces`; once, for it has one nonce.

        place: the names of its folder and of the file.
        """
        from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415 - the extra cipher
            Cipher,
            algorithms,
            modes,
        )

        nonce = os.urandom(NONCE_NBYTES)
        head = MAGIC + self.id + nonce
        encryptor = Cipher(algorithms.AES(self._cipher_key), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(head + place.encode())
        yield head
        for piece in pieces:
            for start in range(0, len(piece), CHUNK_NBYTES):
                yield encryptor.update(memoryview(piece)[start : start + CHUNK_NBYTES])
        yield encryptor.finalize() + encryptor.tag

    def unseal(self, fill: Fill, nbytes: int, *, place: str) -> memoryview:
        """Return what a sealed file of `nbytes` holds.

        fill: has the file's next bytes fill a buffer, or raises what this then raises.

        Raises:
            BlockRefused: it was sealed with another key, or is not what was written at this place.
        """
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - the extra cipher
        from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415 - the same
            Cipher,
            algorithms,
            modes,
        )

        if nbytes < SEAL_NBYTES:
            raise BlockRefused(Fault.TORN, f"only {nbytes} bytes long")
        head = _take(fill, HEAD_NBYTES)
        if not head.startswith(MAGIC):
            raise BlockRefused(Fault.FOREIGN, "it begins like no encrypted block")
        if head[len(MAGIC) : -NONCE_NBYTES] != self.id:
            raise BlockRefused(Fault.LOCKED, "encrypted with another key")
        mode = modes.GCM(head[-NONCE_NBYTES:])
        decryptor = Cipher(algorithms.AES(self._cipher_key), mode).decryptor()
        decryptor.authenticate_additional_data(head + place.encode())
        opened = memoryview(bytearray(nbytes - SEAL_NBYTES))
        chunk = memoryview(bytearray(min(CHUNK_NBYTES, len(opened))))
        for start in range(0, len(opened), CHUNK_NBYTES):
            room = opened[start : start + CHUNK_NBYTES]
            fill(chunk[: len(room)])
            decryptor.update_into(chunk[: len(room)], room)
        try:
            decryptor.finalize_with_tag(_take(fill, TAG_NBYTES))
        except InvalidTag as error:
            problem = "its tag is not that of its bytes at this place"
            raise BlockRefused(Fault.TORN, problem) from error
        return opened.toreadonly()


def _take(fill: Fill, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    fill(memoryview(content))
    return bytes(content)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(digest_size=KEY_NBYTES, key=secret, person=purpose).digest()
