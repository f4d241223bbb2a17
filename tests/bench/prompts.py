"""Prompts of an exact length in tokens that nobody has sent before.

Words that are one token each with the space before them stay so in any company, since the demo
model's tokenizer splits at spaces first. One more token begins the text.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

_SPACE = "\u0120"
"""How a byte-level vocabulary spells a space."""


class Prompts:
    """Makes prompts; the same seed makes the same ones."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Read the tokenizer of the model in `folder`."""
        raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        spelled = (w for w in sorted(raw.get_vocab()) if w.startswith(_SPACE) and w[1:].isalpha())
        words = [" " + word[1:] for word in spelled if word.isascii() or word[1:].isascii()]
        self._words = [w for w in words if len(raw.encode(w, add_special_tokens=False).ids) == 1]
        self._raw = raw
        self.begun = len(raw.encode(" ", add_special_tokens=True).ids) - len(
            raw.encode(" ", add_special_tokens=False).ids
        )
        """Tokens that begin every text."""
        self._draws = random.Random(seed)

    def make(self, tokens: int) -> str:
        """Return a text of exactly `tokens` tokens, those that begin it included."""
        assert tokens > self.begun, "a prompt has a word"
        return "".join(self._draws.choices(self._words, k=tokens - self.begun))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text that was made here, those that begin it included."""
        ids: list[int] = self._raw.encode(text, add_special_tokens=True).ids
        return ids
