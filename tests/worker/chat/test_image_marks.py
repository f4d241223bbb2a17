"""What stands for an image where a template writes its first mark alone: as Gemma 3's processor."""

from __future__ import annotations

import asyncio

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.chat.room import RenderRoom
from mlxd_worker.text.tokenizer import Tokenizer
from tests.worker.made_tokenizers import BOS_ID, EOS_ID, byte_level

BEGIN, PLACE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
)
WHOLE = f"\n\n{BEGIN}{PLACE}{END}\n\n"


def make_raw() -> RawTokenizer:
    """Return a tokenizer with marks, and with tokens of several line ends."""
    raw = byte_level()
    marks = [BEGIN, PLACE, END, "<start_of_turn>", "<end_of_turn>"]
    raw.add_special_tokens([AddedToken(text, special=True) for text in marks])
    raw.add_tokens([AddedToken("\n" * count, special=False) for count in (2, 3)])
    return raw


def id_of(raw: RawTokenizer, spelling: str) -> int:
    """Return the id of a token that there is."""
    number = raw.token_to_id(spelling)
    assert number is not None
    return number


def chat_format(*, marked: bool = True) -> ChatFormat:
    """Return the format of a model whose template writes the first mark alone."""
    raw = make_raw()
    image = (id_of(raw, BEGIN), id_of(raw, PLACE), id_of(raw, END)) if marked else None
    tokenizer = Tokenizer(raw, bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    template = ChatTemplate(TEMPLATE, TEMPLATE, ())
    return ChatFormat(template, tokenizer, sees=True, image_ids=image)


def render_parts(wanted: ChatFormat, *parts: ContentPart) -> tuple[str, list[int]]:
    """Return a message's text and ids."""

    async def render() -> tuple[str, list[int]]:
        room = RenderRoom()
        try:
            prompt = await room.render(wanted, Chat((ChatMessage("user", parts=parts),)))
        finally:
            await room.close()
        return prompt.text, list(prompt.ids)

    return asyncio.run(render())


def text(content: str) -> ContentPart:
    """Return a part that is a text."""
    return ContentPart(text=content)


IMAGE = ContentPart(image=b"file")


def test_an_image_is_on_lines_of_its_own() -> None:
    """Between its marks one token for all places; line ends beside it are read with its own, as
    characters and not as tokens put together."""
    wanted = chat_format()
    written, ids = render_parts(wanted, IMAGE, text("What is it?"), IMAGE)
    expected = f"<start_of_turn>user\n{WHOLE}What is it?{WHOLE}<end_of_turn>\n"
    assert written == expected
    raw = make_raw()
    assert ids == raw.encode(expected, add_special_tokens=False).ids
    three, two = id_of(raw, "\n\n\n"), id_of(raw, "\n\n")
    assert (ids.count(three), ids.count(two)) == (1, 3)
    assert ids.count(id_of(raw, PLACE)) == 2


def test_people_write_no_image() -> None:
    """What they spell is text, and becomes neither a mark nor a place."""
    wanted = chat_format()
    _, ids = render_parts(wanted, text(f"{BEGIN} and {PLACE}"), IMAGE)
    raw = make_raw()
    for mark in (BEGIN, PLACE, END):
        assert ids.count(id_of(raw, mark)) == 1


def test_text_alone_is_left_as_it_is() -> None:
    """Without images, and of a model whose template writes places itself, nothing is put in."""
    written, _ = render_parts(chat_format(), text("no image"))
    assert written == "<start_of_turn>user\nno image<end_of_turn>\n"
    written, _ = render_parts(chat_format(marked=False), IMAGE)
    assert written == f"<start_of_turn>user\n{BEGIN}<end_of_turn>\n"
