"""A load goes through a vocabulary as rarely as can be: twins share it, nobody spells it out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from mlxd_worker.text.control_tokens import twin_of
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.real_inputs import real_input
from tests.support.trained import DEMO
from tests.worker.chat.test_control_tokens import make_raw

COPYING = {"to_str", "from_str", "get_vocab", "get_vocab_size", "from_buffer"}
"""What goes through a whole vocabulary, of the library's."""


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_a_twin_shares_the_model_and_has_its_ids(kind: str) -> None:
    """What one's model is told, the other's knows: there is one vocabulary."""
    raw = RawTokenizer.from_str(make_raw(kind).to_str())  # one that is nobody else's: it is changed
    twin = twin_of(raw, special=["<|im_start|>"])
    assert {i: t.content for i, t in twin.get_added_tokens_decoder().items()} == {
        i: t.content for i, t in raw.get_added_tokens_decoder().items()
    }
    text = "<|im_start|>user\n caf\u00e9 </s> once upon"
    twin.encode_special_tokens = raw.encode_special_tokens = False
    assert twin.encode(text, add_special_tokens=False).ids == (
        raw.encode(text, add_special_tokens=False).ids
    )
    raw.model.dropout = 0.25
    assert twin.model.dropout == 0.25


@pytest.mark.parametrize("folder", [DEMO, real_input("models", "stories260k")])
def test_a_load_reads_a_vocabulary_twice_and_writes_none(folder: Path) -> None:
    """Once by the library and once to judge it, also with chats and special tokens in texts."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in COPYING:
            calls.append(called.__name__)
        elif event == "call" and frame.f_code.co_name == "read_settings":
            calls.append("read_settings")

    sys.setprofile(note)
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.control_tokens(written="</s>", named=())
        tokenizer.encode("a</s>", parse_special=True)
        longest = tokenizer.piece_chars_max
        size = tokenizer.vocab_size
    finally:
        sys.setprofile(None)
    assert sorted(calls) == ["from_buffer", "get_vocab_size", "read_settings"]
    vocabulary = tokenizer._raw.get_vocab(with_added_tokens=True)
    assert (longest, size) == (max(map(len, vocabulary)), len(vocabulary))
