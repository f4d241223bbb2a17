"""A real browser for tests of the page: Debian's Chromium, headless, over Playwright.

What goes wrong in a page fails its test: an exception, a message of the console's, and whatever its
Content-Security-Policy has stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Literal

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH (make tools installs it on Debian)"
)
FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
WAIT_MS = 60_000
DESK, PHONE = (1280, 860), (390, 844)
UNANSWERED = "Failed to load resource"
"""What the console says of a refusal, or of a server that is gone, which the page has to meet."""
_AXE = files("axe_playwright_python").joinpath("axe.min.js")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run a browser around the body."""
    sandbox = () if os.geteuid() else ("--no-sandbox",)  # root can have none
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=[*FLAGS, *sandbox]
        )
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def open_page(
    chromium: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESK,
    theme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Page]:
    """Open the page of the gateway at `url` around the body, in a session of its own."""
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not message.text.startswith(UNANSWERED):
            problems.append(message.text)

    context = await chromium.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(WAIT_MS)
    try:
        page = await context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(f"{url}/page/")
        yield page
        assert problems == []
    finally:
        await context.close()


async def violations(page: Page) -> list[str]:
    """Return what axe finds against a page as it is, each with the elements."""
    await page.evaluate(_AXE.read_text(encoding="utf-8"))
    broken: Any = await page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes']]}"
        for each in broken
    ]


async def is_too_wide(page: Page) -> bool:
    """Tell whether a page has to be scrolled sideways."""
    width: Any = await page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return bool(width > 0)
