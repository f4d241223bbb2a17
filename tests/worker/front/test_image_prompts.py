"""What is refused of a prompt with images before any of them is decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.front.prompting import prompt_of
from mlxd_worker.text.tokenizer import Tokenizer
from tests.worker.made_tokenizers import byte_level

CONTEXT, TOKENS = 64, 16


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("images", "text", "words"), [
        (CONTEXT // TOKENS, "", "4 images of 16 tokens; the context of 64 takes at most 63"),
        (1, "x" * (1 << 20), f"{1 << 20} characters"),
    ],
)  # fmt: skip
async def test_what_no_context_holds_is_not_decoded(images: int, text: str, words: str) -> None:
    """Images or text alone are too many: refused, though there is nobody who could decode them."""
    parts = (*[ContentPart(image=b"x")] * images, ContentPart(text))
    spec: Any = SimpleNamespace(prompt=Chat((ChatMessage("user", parts=parts),)))
    sizes = SightSizes(token_id=5, tokens=TOKENS, side=2, hidden=4, pass_values=1)
    loaded: Any = SimpleNamespace(
        tokenizer=Tokenizer(byte_level(), bos_id=None, add_bos=None, eos_ids=()),
        context_length=CONTEXT, chat=object(), sight=SimpleNamespace(sizes=sizes),
    )  # fmt: skip
    nobody: Any = SimpleNamespace()
    with pytest.raises(InvalidRequest, match=words) as caught:
        await prompt_of(nobody, spec, loaded, "r")
    assert caught.value.violations[0].field == "chat.messages"
