"""Images at the wire's edge: carried byte for byte, and bounded before anything looks into them."""

from __future__ import annotations

import pytest

from mlxd.v1 import inference_pb2 as pb
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart, chat_images
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.convert_chat import messages_from_json
from mlxd_shared.wire.records import write
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, plan_of, scan

IMAGE = ContentPart(image=b"\x00\xff", media_type="image/png")
CHAT = Chat((ChatMessage("user", parts=(ContentPart("a"), IMAGE, ContentPart("b"))),))


def refuse(*parts: pb.ContentPart, role: str = "user") -> tuple[str, str]:
    """Return the one violation of a message of these parts."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=role, parts=parts)])
    with pytest.raises(InvalidRequest) as caught:
        generate_from_pb(pb.GenerateRequest(chat=chat))
    (violation,) = caught.value.violations
    return violation.field, violation.description


def test_images_go_there_and_back() -> None:
    """In their order between texts; of a message's text they are no part."""
    chat = write(CHAT, pb.ChatPrompt)
    assert [part.WhichOneof("kind") for part in chat.messages[0].parts] == ["text", "image", "text"]
    assert generate_from_pb(pb.GenerateRequest(chat=chat)).prompt == CHAT
    assert CHAT.messages[0].text == "a\nb"
    assert [*chat_images(CHAT)] == [("chat.messages[0].parts[1].image", IMAGE)]
    (saved,) = messages_from_json([{"role": "user", "parts": [{"image": "AP8="}]}])
    assert saved.images == (ContentPart(image=b"\x00\xff"),)


def test_each_bound_has_its_own_error() -> None:
    """Of an image, of all of them, and of their number; none is looked into."""
    most, whole = config.IMAGE_BYTES_MAX, config.IMAGES_BYTES_MAX
    large = pb.ContentPart(image=bytes(most + 1))
    assert refuse(large) == ("chat.messages[0].parts[0].image", f"at most {most} bytes of an image")
    half = pb.ContentPart(image=bytes(whole // 2 + 1))
    problem = f"at most {whole} bytes of images in all messages"
    assert refuse(half, half) == ("chat.messages", problem)
    small = pb.ContentPart(image=b"x")
    problem = f"at most {config.IMAGES_MAX} images in all messages"
    assert refuse(*[small] * (config.IMAGES_MAX + 1)) == ("chat.messages", problem)


def test_who_may_show_what() -> None:
    """Users and tools, images that have bytes, of the types that are read."""
    place = "chat.messages[0].parts[0]"
    for role in ("system", "developer", "assistant"):
        assert refuse(pb.ContentPart(image=b"x"), role=role)[0] == f"{place}.image"
    assert refuse(pb.ContentPart(image=b""))[0] == f"{place}.image"
    for kind in ("image/svg+xml", "video/mp4", "audio/wav"):
        other = pb.ContentPart(image=b"x", media_type=kind)
        assert refuse(other)[0] == f"{place}.media_type"
    unknown = pb.ContentPart.FromString(b"\x22\x01x")  # a field of no kind that there is
    assert refuse(unknown)[0] == place
    assert refuse(pb.ContentPart(text="x", media_type="image/png"))[0] == f"{place}.media_type"


def test_an_image_is_counted_before_its_request_is_parsed() -> None:
    """As long as an image may be it passes the walk, and one byte more does not."""
    plan = plan_of(pb.GenerateRequest.DESCRIPTOR)

    def raw(nbytes: int) -> bytes:
        part = pb.ContentPart(image=bytes(nbytes))
        message = pb.ChatMessage(role="user", parts=[part])
        chat = pb.ChatPrompt(messages=[message])
        return pb.GenerateRequest(chat=chat).SerializeToString()

    assert scan(raw(config.IMAGE_BYTES_MAX), plan, FROM_CLIENTS).parts < 10
    with pytest.raises(InvalidRequest) as caught:
        scan(raw(config.IMAGE_BYTES_MAX + 1), plan, FROM_CLIENTS)
    assert caught.value.violations[0].field == "chat.messages.parts.image"
