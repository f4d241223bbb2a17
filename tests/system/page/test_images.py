"""Images in the page's chat, in a real browser: chosen, pasted, dropped, sent."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from playwright.async_api import Browser, FilePayload, Page, expect

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.fakes.replies import model, status
from tests.support.browser import NEEDS_CHROMIUM, open_page, violations
from tests.support.gateways import gateway_over
from tests.support.seeing import encode_image, picture
from tests.support.spoken import answer_with_text
from tests.system.page.test_answers import Lasting

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="module")]
expect.set_options(timeout=30_000)
PNG, OTHER = encode_image(picture(1)), encode_image(picture(2))
MODULE = """
async () => {
  const images = await import("/page/lib/images.js");
  const { messagesOf, turn } = await import("/page/lib/chat.js");
  const { problemOf, contentOf, filesOf } = images;
  const file = (size, type = "image/png") => ({ name: "a", size, type });
  const seen = { name: "a", size: 1, url: "data:x" };
  const transfer = (types, files) => ({ types, files });
  return {
    bounds: [images.IMAGES_MAX, images.IMAGE_BYTES_MAX, images.IMAGES_BYTES_MAX],
    types: images.TYPES,
    problems: [
      problemOf([file(1)], []), problemOf([file(1, "text/plain")], []), problemOf([file(0)], []),
      problemOf([file(2 ** 23 + 1)], []), problemOf([file(2 ** 23)], []),
      problemOf([file(1)], Array(16).fill(file(1))), problemOf(Array(17).fill(file(1)), []),
      problemOf([file(2 ** 23)], [file(2 ** 22)]),
    ].map((problem) => problem.split(" ").slice(-2).join(" ")),
    contents: [contentOf("b", []), contentOf("b", [seen]), contentOf("", [seen])],
    sent: messagesOf([turn("user", "b", [seen]), turn("user", "c")], "").map((m) => m.content),
    files: [
      filesOf(null), filesOf(transfer(["Files"], ["f"])),
      filesOf(transfer(["text/plain", "Files"], ["f"])), filesOf(transfer([], [])),
    ],
  };
}
"""
GIVE = """
(field, [kind, name, text]) => {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  const init = { bubbles: true, cancelable: true };
  field.dispatchEvent(
    kind === "paste"
      ? new ClipboardEvent(kind, { ...init, clipboardData: transfer })
      : new DragEvent(kind, { ...init, dataTransfer: transfer }),
  );
}
"""


def seeing(*, sees: bool = True) -> types_pb2.Model:
    """Return a model that has a chat's template, and sees."""
    known = model()
    known.has_chat_template, known.has_vision = True, sees
    return known


def file(name: str, content: bytes = PNG, kind: str = "image/png") -> FilePayload:
    """Return a file that is chosen."""
    return {"name": name, "mimeType": kind, "buffer": content}


async def give(page: Page, kind: str, name: str, content: bytes) -> None:
    """Paste an image into the message, or drop one there."""
    message = page.get_by_label("Message", exact=True)
    await message.evaluate(GIVE, [kind, name, base64.b64encode(content).decode()])


def requests_of(fake: FakeServer) -> list[inference_pb2.GenerateRequest]:
    """Return what the controller was asked."""
    return [r for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]


async def test_the_pure_module(chromium: Browser) -> None:
    """Its bounds are the server's own, each with its words; a text that is pasted stays a text."""
    async with (
        serving(Answers(statuses=[status()])) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        got: Any = await page.evaluate(MODULE)
    assert got["bounds"] == [config.IMAGES_MAX, config.IMAGE_BYTES_MAX, config.IMAGES_BYTES_MAX]
    assert got["types"] == ["image/png", "image/jpeg", "image/webp", "image/gif"]
    assert got["problems"] == [
        "", "or GIF.", "is empty.", "8 MiB.", "", "16 images.", "16 images.", "10 MiB.",
    ]  # fmt: skip
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    whole = [image, {"type": "text", "text": "b"}]
    assert got["contents"] == ["b", whole, [image]]
    assert got["sent"] == [whole, "c"]
    assert got["files"] == [[], ["f"], [], []]


async def test_images_are_chosen_pasted_dropped_and_sent(chromium: Browser) -> None:
    """Each way adds one, which can be taken back by the keyboard; what is sent is shown in its turn
    and goes with every later message."""
    answers = Answers(generate=answer_with_text(), models=[seeing()], statuses=[status()])
    async with (
        serving(answers, make=Lasting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        await page.get_by_role("link", name="Chat", exact=True).click()
        waiting = page.get_by_role("list", name="Images of the next message")
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Add images").press("Enter")
        await (await chooser.value).set_files([file("one.png"), file("two.png", OTHER)])
        await expect(waiting.get_by_role("img")).to_have_count(2)
        await expect(page.get_by_text("Added one.png, two.png.")).to_be_attached()
        await give(page, "paste", "three.png", OTHER)
        await expect(waiting.get_by_role("img", name="three.png")).to_be_visible()
        await give(page, "drop", "four.png", PNG)
        await expect(waiting.get_by_role("img")).to_have_count(4)
        assert await violations(page) == []
        for name in ("two.png", "four.png"):
            await page.get_by_role("button", name=f"Remove {name}").press("Enter")
            await expect(page.get_by_role("img", name=name)).to_have_count(0)
            await expect(page.get_by_label("Message", exact=True)).to_be_focused()
        # What is refused leaves the others alone.
        await page.locator("input[type=file]").set_input_files(file("a.txt", b"x", "text/plain"))
        await expect(page.get_by_role("alert")).to_have_text("a.txt is no PNG, JPEG, WebP or GIF.")

        await page.get_by_label("Message", exact=True).fill("What is it?")
        await page.get_by_label("Message", exact=True).press("Enter")
        await expect(page.get_by_text("It rains.", exact=True)).to_be_visible()
        await expect(waiting).to_have_count(0)
        await expect(page.get_by_role("alert")).to_have_count(0)
        turn = page.locator(".turn.user")
        await expect(turn.get_by_role("img", name="one.png")).to_be_visible()
        width: Any = await turn.locator("img").first.evaluate("(image) => image.naturalWidth")
        assert width == picture(1).width
        assert await violations(page) == []
        await page.get_by_label("Message", exact=True).fill("And now?")
        await page.get_by_label("Message", exact=True).press("Enter")
        await expect(page.locator(".turn.assistant .text")).to_have_count(2)
    first, second = requests_of(fake)
    assert [part.image for part in first.chat.messages[0].parts] == [PNG, OTHER, b""]
    assert first.chat.messages[0].parts[2].text == "What is it?"
    assert [len(message.parts) for message in second.chat.messages] == [3, 0, 0]


async def test_a_model_that_does_not_see_is_shown_none(chromium: Browser) -> None:
    """There is no button; what is pasted is refused in words, and nothing is sent of it."""
    blind = Answers(generate=answer_with_text(), models=[seeing(sees=False)], statuses=[status()])
    async with (
        serving(blind, make=Lasting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        await page.get_by_role("link", name="Chat", exact=True).click()
        message = page.get_by_label("Message", exact=True)
        await message.fill("hi")
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        await expect(page.get_by_role("button", name="Add images")).to_have_count(0)
        await give(page, "paste", "one.png", PNG)
        await expect(page.get_by_role("alert")).to_have_text("This model does not see images.")
        await message.press("Enter")
        await expect(page.get_by_text("It rains.", exact=True)).to_be_visible()
    (only,) = requests_of(fake)
    assert only.chat.messages[0].content == "hi"
    assert not only.chat.messages[0].parts
