"""The page in a real browser, over a real gateway, controller and worker on the built-in model."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from mlxd import Client
from tests.support.browser import (
    NEEDS_CHROMIUM,
    PHONE,
    is_too_wide,
    open_page,
    violations,
)
from tests.support.chat_template import write_bare_demo, write_template
from tests.support.cli import LIMIT_S, mlxd
from tests.support.gateways import Web, serve_web
from tests.support.served import serve

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="module")]
WORDS = re.compile(r"\w")
NONE_HELD = re.compile(r": nothing, of ")
expect.set_options(timeout=30_000)


@pytest.fixture(name="models", scope="module")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options for the built-in model without a chat's template, and with a plain one."""
    folder = tmp_path_factory.mktemp("models")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chatty = write_template(write_bare_demo(folder / "chatty"), template)
    bare = write_bare_demo(folder / "demo")
    return ("--model", f"demo={bare}", "--model", f"chatty={chatty}")


def controller_of(web: Web) -> Client:
    """Return a client of the controller behind a gateway."""
    assert web.served is not None
    return Client(web.served.address)


async def view(page: Page, name: str) -> None:
    """Open a view by its link, and wait until it is shown: views have fields of one name."""
    link = page.get_by_role("navigation").get_by_role("link", name=name, exact=True)
    await link.click()
    await expect(link).to_have_attribute("aria-current", "page")


async def test_a_model_s_life(chromium: Browser, models: tuple[str, ...]) -> None:
    """Loaded with progress, pinned, talked to, stopped, unloaded; memory moves with it."""
    async with (
        serve_web(*models) as web,
        open_page(chromium, web.url) as page,
    ):
        memory = page.get_by_role("img", name=re.compile("^Memory of cpu"))
        await expect(memory).to_have_attribute("aria-label", NONE_HELD)

        await page.get_by_role("button", name="Load chatty").click()
        await page.get_by_role("progressbar", name="Loading chatty").wait_for()
        pin = page.get_by_role("button", name="Pin chatty")
        await expect(pin).to_have_attribute("aria-pressed", "false")
        await expect(memory).not_to_have_attribute("aria-label", NONE_HELD)
        account = page.get_by_role("img", name="Memory of chatty: weights")
        await expect(account).to_have_attribute("aria-label", re.compile(r"weights 20\.9 MiB"))
        async with controller_of(web) as client:
            await pin.click()
            await expect(pin).to_have_attribute("aria-pressed", "true")
            assert (await client.model("chatty")).pinned
            await pin.click()
            await expect(pin).to_have_attribute("aria-pressed", "false")
            # A look at the status from before the first press may say so before the server does.
            async with asyncio.timeout(LIMIT_S):
                while (await client.model("chatty")).pinned:
                    await expect(pin).to_be_visible()

            await view(page, "Chat")
            await page.get_by_text("Options").click()
            await page.get_by_label("Max tokens").fill("900")
            message = page.get_by_label("Message", exact=True)
            await message.fill("Once upon a time")
            await message.press("Enter")
            answer = page.locator(".turn.assistant .text")
            stop = page.get_by_role("button", name="Stop")
            await expect(answer.first).to_have_text(WORDS)  # while it is still being written
            await stop.click()
            await expect(page.get_by_text("Stopped.", exact=True)).to_be_visible()
            written = await answer.all_inner_texts()
            async with client.watch_status(interval_s=0.1) as watch:
                async for status in watch:
                    if not any(worker.streams_running for worker in status.workers):
                        break
            assert await answer.all_inner_texts() == written

            await page.get_by_label("Max tokens").fill("8")
            await page.get_by_role("button", name="Regenerate").click()
            await expect(page.get_by_text("8 tokens")).to_be_visible()

            await page.get_by_label("Max tokens").fill("900")
            await page.get_by_role("button", name="Regenerate").click()
            await view(page, "Overview")
            await expect(page.get_by_role("cell", name="1 4 rows")).to_be_visible()
            await page.get_by_role("button", name="Unload chatty").click()
            await page.get_by_role("button", name="End them now").click()
            await expect(page.get_by_role("button", name="Load chatty")).to_be_enabled()
            await expect(page.get_by_text("No model is loaded.")).to_be_visible()
            assert (await client.status()).workers == ()
            await view(page, "Chat")
            await expect(page.get_by_role("alert")).to_contain_text("chatty")


async def test_what_was_begun_is_shown_to_who_comes_later(
    chromium: Browser, models: tuple[str, ...]
) -> None:
    """Fit, log, a text continued, and the plots' last values, on a phone as on a desk."""
    async with serve_web(*models) as web, controller_of(web) as client:
        async with client.load("demo") as updates:
            assert [update async for update in updates]
        await client.complete("Once", model="demo", max_tokens=40)
        async with open_page(chromium, web.url, size=PHONE) as page:
            await expect(page.get_by_role("button", name="Unload demo")).to_be_visible()
            plots = page.get_by_role("img", name=re.compile("over the last five minutes"))
            await expect(plots).to_have_count(3)
            assert not await is_too_wide(page)

            await view(page, "Fit")
            await page.get_by_label("Model, ORG/NAME").fill("chatty")
            await page.get_by_label("Context, tokens").fill("64")
            await page.get_by_role("button", name="Check").click()
            await expect(page.get_by_text("It fits.", exact=True)).to_be_visible()
            await expect(page.get_by_role("rowheader", name="weights")).to_be_visible()
            await page.get_by_label("Context, tokens").fill("99999999")
            await page.get_by_role("button", name="Check").click()
            await expect(page.get_by_role("alert")).to_contain_text("context_length")
            assert not await is_too_wide(page)

            await view(page, "Log")
            await page.get_by_role("combobox", name="Model").select_option("demo")
            await expect(page.get_by_role("log")).to_contain_text("listening")
            assert not await is_too_wide(page)

            await view(page, "Chat")
            await page.get_by_role("combobox", name="Model").select_option("demo")
            await page.get_by_label("Text to continue").fill("The king")
            await page.get_by_role("button", name="Send").click()
            await expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
            await expect(page.locator(".turn.assistant .text").first).to_have_text(WORDS)
            assert not await is_too_wide(page)


async def test_the_page_outlives_its_server(chromium: Browser, models: tuple[str, ...]) -> None:
    """Killed, it is said to be gone; started again, everything goes on without a reload."""
    async with serve_web(*models) as web:
        assert web.served is not None
        page_of = open_page(chromium, web.url)
        page = await page_of.__aenter__()
        await expect(page.get_by_role("button", name="Load demo")).to_be_enabled()
        await page.evaluate("() => { globalThis.stays = true; }")
        web.served.process.kill()
        await expect(page.get_by_role("alert")).to_have_text(re.compile("connection is lost"))
    async with serve("--http", web.url.removeprefix("http://"), *models):
        await expect(page.get_by_text("Connected")).to_be_visible()
        await expect(page.get_by_role("alert")).to_have_count(0)
        await page.get_by_role("button", name="Load demo").click()
        await expect(page.get_by_role("button", name="Unload demo")).to_be_visible()
        assert await page.evaluate("() => globalThis.stays")
        await page_of.__aexit__(None, None, None)


async def test_a_key_is_offered_what_it_may_do(
    chromium: Browser, models: tuple[str, ...], tmp_path: Path
) -> None:
    """Without a key the field for one; with one, its scopes alone, until it is forgotten."""
    keys_file = tmp_path / "keys.json"
    secrets = {}
    for scope in ("infer", "observe", "manage"):
        done = await mlxd("keys", "add", scope, "--keys-file", str(keys_file), "--scope", scope)
        secrets[scope] = done.out.strip()
    offers = {
        "infer": ["Overview", "Chat"],
        "observe": ["Overview", "Log"],
        "manage": ["Overview", "Fit", "Log"],
    }
    async with (
        serve_web(*models, "--keys-file", str(keys_file)) as web,
        open_page(chromium, web.url) as page,
    ):
        field = page.get_by_label("Key or token of this server")
        await field.fill("mlxd-wrong")
        await field.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        for scope, views in offers.items():
            await field.fill(secrets[scope])
            await field.press("Enter")
            links = page.get_by_role("navigation").get_by_role("link")
            await expect(links).to_have_text(views)
            await expect(page.get_by_role("rowheader")).to_have_count(2)
            manages, observes = scope == "manage", scope == "observe"
            await expect(page.get_by_role("button", name="Load demo")).to_have_count(int(manages))
            await expect(page.get_by_role("heading", name="Memory")).to_have_count(int(observes))
            stored = await page.evaluate("() => [{...sessionStorage}, {...localStorage}]")
            assert secrets[scope] in stored[0].values()
            assert secrets[scope] not in stored[1].values()
            await page.get_by_role("button", name="Forget key").click()
        await expect(field).to_be_visible()
        assert await violations(page) == []


async def test_everything_by_the_keyboard(chromium: Browser, models: tuple[str, ...]) -> None:
    """Load, views, a chat, its stop and unload with Tab, Enter, Space and Escape alone."""

    async def tab_to(page: Page, name: str) -> None:
        """Press Tab until the focus is on what has this name; a page has an end."""
        for _ in range(60):
            await page.keyboard.press("Tab")
            focused = await page.evaluate(
                "() => { const e = document.activeElement;"
                " return e.getAttribute('aria-label') ?? e.innerText?.trim() ?? ''; }"
            )
            if focused == name:
                return
        raise AssertionError(name)

    async with (
        serve_web(*models) as web,
        open_page(chromium, web.url) as page,
    ):
        await page.get_by_role("button", name="Load chatty").wait_for()
        await tab_to(page, "Skip to the content")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("main")).to_be_focused()
        await tab_to(page, "Load chatty")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Unload chatty")).to_be_visible()
        await tab_to(page, "Chat")
        await page.keyboard.press("Enter")
        await page.get_by_label("Message", exact=True).wait_for()
        await tab_to(page, "What was said")
        await page.keyboard.press("Tab")
        await page.keyboard.type("Once upon a time")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant .text").first).to_have_text(WORDS)
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        await tab_to(page, "Overview")
        await page.keyboard.press("Enter")
        await tab_to(page, "Unload chatty")
        await page.keyboard.press("Space")
        await expect(page.get_by_role("button", name="Load chatty")).to_be_enabled()
