"""A child that cannot read the tokenizer is the model's matter, not the text's that came first."""

from __future__ import annotations

import sys

import grpc
import pytest

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.wire.status import code_of
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import COMMAND
from mlxd_worker.tokenizing.room import TokenRoom
from tests.worker.made_tokenizers import byte_level

HANGS = (sys.executable, "-c", "import threading; threading.Event().wait()")
DIES = (sys.executable, "-c", "raise SystemExit(1)")


class Unread(Tokenizer):
    """One whose file another process cannot read."""

    @property
    def content(self) -> bytes:
        """What is no tokenizer."""
        return b'{"version": "1.0"}'


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "command", "learn_s", "problem"),
    [
        (Unread, COMMAND, config.TOKENIZE_MOST_S, "is not a tokenizer: "),
        (Tokenizer, HANGS, 0.1, "takes a process longer than 0.1 s to read"),
        (Tokenizer, DIES, config.TOKENIZE_MOST_S, "died of reading it"),
    ],
)
async def test_a_child_that_cannot_read_the_tokenizer_names_its_file(
    kind: type[Tokenizer], command: tuple[str, ...], learn_s: float, problem: str
) -> None:
    """By a code that tells a client to leave its request as it is; so is the next one told."""
    tokenizer = kind(byte_level(), bos_id=None, add_bos=None, eos_ids=(), is_plain=False)
    room = TokenRoom(command=command, learn_s=learn_s)
    try:
        for _ in range(2):
            with pytest.raises(InvalidModel) as caught:
                await room.encode(tokenizer, "ab", field="text", kind="tokenize")
            assert caught.value.file == "tokenizer.json"
            assert problem in caught.value.problem
            assert code_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        await room.close()
