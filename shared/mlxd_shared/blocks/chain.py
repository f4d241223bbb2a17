"""Names of blocks: a hash over what computes them and over every token up to their end. Pure.

Invariants:
- A block is `block_tokens` tokens, the first at a multiple of that. Its name is the hash of the
  name before it and of its own tokens; the first follows the form's. So two blocks have one name
  only where the same model, in the same form, has read the same tokens from the beginning on.
- A form is all that keys and values depend on beside the tokens. What the model's digest covers
  (weights, config, tokenizer, chat template) is not said again.
- Each field is hashed behind its length, so that no two forms are one text.
- Names are those of files, which anybody with the disk can read. Where blocks are encrypted they
  are made under a key, so that nobody without it can tell whether a prompt that he guesses is
  there; and what is written with a key, with another one, and without, has different names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b

NAME_NBYTES = 32
TOKEN_NBYTES = 4
"""Tokens are unsigned little-endian 32-bit integers."""

BLOCK_TOKENS = 256
"""Tokens of a block. Half of one is lost at a prompt's end on average; each is a file or two."""

ARITHMETIC_VERSION = 1
"""Raised whenever mlxd computes other keys, values or states of the same weights and tokens."""

_PERSON = b"mlxd prefix"


@dataclass(frozen=True, slots=True)
class Form:
    """What computes a block, beside its tokens."""

    model_digest: str
    weights: str
    """How the weights are kept in memory."""
    context_length: int
    """Some rotations depend on what a model is loaded for (decision 0039)."""
    device: str
    """Kind of device: each rounds in its own way."""
    library: str
    """What computes, and its version: another one may round in another way."""
    layers: tuple[str, ...]
    """What each layer keeps: kind, shapes, types, window; in order."""
    block_tokens: int = BLOCK_TOKENS
    arithmetic: int = ARITHMETIC_VERSION


def name_of_form(form: Form, *, name_key: bytes = b"") -> bytes:
    """Return the name that the first block follows, `NAME_NBYTES` long.

    name_key: what names are made under; empty: they are not secret.
    """
    digest = blake2b(digest_size=NAME_NBYTES, person=_PERSON, key=name_key)
    for field in fields(form):
        value = getattr(form, field.name)
        texts = value if isinstance(value, tuple) else (str(value),)
        digest.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.digest()


def next_name(before: bytes, tokens: bytes, *, name_key: bytes = b"") -> bytes:
    """Return the name of the block of `tokens` that follows the one named `before`."""
    digest = blake2b(before, digest_size=NAME_NBYTES, person=_PERSON, key=name_key)
    digest.update(tokens)
    return digest.digest()


def names_of(
    form_name: bytes, tokens: bytes, *, block_tokens: int, name_key: bytes = b""
) -> tuple[bytes, ...]:
    """Return the names of all whole blocks of a prompt, in order; none of a rest.

    name_key: as for `name_of_form`.

    Raises:
        ValueError: `tokens` are no whole number of tokens, or a block has none.
    """
    if len(tokens) % TOKEN_NBYTES or block_tokens < 1:
        raise ValueError(f"{len(tokens)} bytes in blocks of {block_tokens} tokens")
    block_nbytes = block_tokens * TOKEN_NBYTES
    names: list[bytes] = []
    name = form_name
    for start in range(0, len(tokens) - block_nbytes + 1, block_nbytes):
        name = next_name(name, tokens[start : start + block_nbytes], name_key=name_key)
        names.append(name)
    return tuple(names)
