"""What a model says, in a real browser over a scripted controller: thoughts, calls, faults."""
# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, expect

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, types_pb2
from mlxd_shared.domain.errors import InternalError, InvalidRequest, MlxdError
from mlxd_shared.wire.interceptors import Context
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.fakes.replies import fit, model, status
from tests.support.browser import NEEDS_CHROMIUM, open_page, violations
from tests.support.gateways import gateway_over
from tests.support.spoken import ARGUMENTS, CALL_ID, answer_with_call, answer_with_text

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="module")]
expect.set_options(timeout=30_000)
MARKUP = "<img src=x onerror=alert(1)> & **bold**\n```py\nif a < b:\n    pass\n```\nthe end"
TOOLS = [{"name": "weather", "parameters": {"type": "object"}}]
Said = inference_pb2.GenerateResponse | MlxdError
VIEWS = ("Overview", "Chat", "Fit", "Log")


class Lasting(FakeServer):
    """Whose watch goes on for as long as somebody watches."""

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        async for message in super().WatchStatus(request, context):
            yield message
        await asyncio.Event().wait()


class Fitting(Lasting):
    """Where anything would fit, and nothing is loaded."""

    async def LoadModel(
        self, request: model_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[model_pb2.LoadModelResponse]:
        self.requests.append(request)
        if not request.validate_only:
            raise InvalidRequest.of("model", "has gone")
        yield model_pb2.LoadModelResponse(fit=fit(request.model))


def chatty(state: str = "READY") -> types_pb2.Model:
    """Return a model that has a chat's template."""
    known = model(state=state)
    known.has_chat_template = True
    return known


async def say(page: Page, text: str) -> None:
    """Send a message, once there is a model to ask: before, Enter leaves the message as it is."""
    message = page.get_by_label("Message", exact=True)
    await message.fill(text)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await message.press("Enter")


async def test_reasoning_and_a_call_that_is_answered(chromium: Browser) -> None:
    """Thoughts fold away, a call waits for its result, and the model is asked on with it."""
    answers = Answers(
        generate=answer_with_call(),
        generate_again=[answer_with_text(MARKUP)],
        models=[chatty()],
        statuses=[status()],
    )
    async with (
        serving(answers, make=Lasting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        await page.get_by_role("link", name="Chat", exact=True).click()
        await page.get_by_text("Options").click()
        await page.get_by_label("Tools, as JSON").fill("{")
        await say(page, "What is the weather?")
        await expect(page.get_by_role("alert")).to_contain_text("Tools: ")
        await page.get_by_label("Tools, as JSON").fill(json.dumps(TOOLS))
        await page.get_by_role("button", name="Send").click()  # the message is still there
        await page.get_by_text("Reasoning").click()
        await expect(page.get_by_text("hmm", exact=True)).to_be_visible()
        await expect(page.get_by_text("Let me see.", exact=True)).to_be_visible()
        await expect(page.get_by_label("Arguments of weather")).to_contain_text("Bern")
        await expect(page.get_by_role("button", name="Send")).to_be_disabled()
        assert await violations(page) == []
        await page.get_by_label("Result of weather").fill("rain")
        await page.get_by_role("button", name="Answer", exact=True).click()

        # What a model writes is text, whatever it looks like.
        plain = page.get_by_text(MARKUP.partition("\n")[0], exact=True)
        await expect(plain).to_be_visible()
        await expect(page.get_by_label("Code py")).to_have_text("if a < b:\n    pass")
        assert await page.locator(".turns img").count() == 0
        first, second = (
            request for request in fake.requests
            if isinstance(request, inference_pb2.GenerateRequest)
        )  # fmt: skip
        assert "weather" in first.chat.tools_json[0]
        roles = [message.role for message in second.chat.messages]
        assert roles == ["user", "assistant", "tool"]
        (call,) = second.chat.messages[1].tool_calls
        assert (call.id, json.loads(call.arguments_json)) == (CALL_ID, json.loads(ARGUMENTS))
        assert second.chat.messages[2].tool_call_id == CALL_ID


async def test_an_answer_that_fails_says_why(chromium: Browser) -> None:
    """What has come stays; the next message is asked without what was nothing."""
    broken: list[Said] = [answer_with_call()[0], InternalError("e-7")]
    answers = Answers(
        generate=[InternalError("e-6")], generate_again=[broken, answer_with_text()],
        models=[chatty()], statuses=[status()],
    )  # fmt: skip
    async with (
        serving(answers, make=Lasting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        await page.get_by_role("link", name="Chat", exact=True).click()
        await say(page, "a")
        await expect(page.get_by_role("alert")).to_contain_text("e-6")
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.get_by_role("alert")).to_contain_text("e-7")
        await say(page, "b")
        await expect(page.get_by_text("It rains.", exact=True)).to_be_visible()
        last = fake.requests[-1]
        for request in fake.requests:
            last = request if isinstance(request, inference_pb2.GenerateRequest) else last
        assert isinstance(last, inference_pb2.GenerateRequest)
        assert [message.role for message in last.chat.messages] == ["user", "user"]


async def test_a_link_to_a_fit_asks_about_known_models_alone(chromium: Browser) -> None:
    """Anybody can write a link: what it names is checked at a press; a failed load is shown."""
    answers = Answers(models=[chatty()], statuses=[status()])
    async with (
        serving(answers, make=Fitting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url) as page,
    ):
        field = page.get_by_label("Model, ORG/NAME")
        for link, text in (("%zz", ""), ("else%2Fmodel", "else/model")):
            await page.goto(f"{web.url}/page/#fit/{link}")
            await page.reload()
            await expect(field).to_have_value(text)
            await expect(page.get_by_text("Connected")).to_be_visible()
            await expect(page.locator("datalist option")).to_have_count(1)
        assert not any(isinstance(each, model_pb2.LoadModelRequest) for each in fake.requests)
        await page.get_by_role("button", name="Check").click()
        await expect(page.get_by_text("It fits.", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Load with these options").click()
        await expect(page.get_by_text("else/model: model: has gone", exact=True)).to_be_visible()

        await page.goto(f"{web.url}/page/#fit/demo")
        await page.reload()
        await expect(page.get_by_role("heading", name="demo")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_nothing_keeps_anybody_out(chromium: Browser, theme: str) -> None:
    """Axe finds nothing in any view, with a model that is loaded, one that loads and one failed."""
    others = [model("b", state="LOADING"), model("c", state="FAILED", error="no room")]
    answers = Answers(models=[chatty(), *others], statuses=[status()])
    async with (
        serving(answers, make=Lasting) as fake,
        gateway_over(fake.address) as web,
        open_page(chromium, web.url, theme="dark" if theme == "dark" else "light") as page,
    ):
        await page.get_by_role("img", name="Memory of demo: weights").wait_for()
        for name in VIEWS:
            await page.get_by_role("link", name=name, exact=True).click()
            await page.get_by_role("heading", level=1, name=name).wait_for()
            assert await violations(page) == [], name
        # The theme that is chosen by hand is kept; each of the three shows itself.
        for chosen in ("light", "dark", "auto"):
            await page.get_by_role("button", name="Theme: ").click()
            await expect(page.locator(f":root[data-theme={chosen}]")).to_have_count(1)
            assert await violations(page) == []
