"""What a child that reads texts answers where the library gives up."""

from __future__ import annotations

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from mlxd_worker.tokenizing.process import BAD, GOOD, Desk, message

STEERING = {"written": "", "named": []}


def test_what_a_tokenizer_cannot_read_of_a_chat_is_said_of_its_file() -> None:
    """As of a text; the child lives, and reads what it can."""
    desk = Desk()
    content = RawTokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).to_str().encode()
    assert desk.answer(message({"kind": "learn"}, content)) == GOOD

    chat = {"kind": "chat", "nonce": "~", "steering": STEERING}
    answer = desk.answer(message(chat, b"b"))
    assert answer.startswith(BAD + b"cannot read a chat")
    assert desk.answer(message(chat, b"a")).startswith(GOOD)
