"""One browser for the tests of a file: each has a session of its own in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browser import browser


@pytest_asyncio.fixture(name="chromium", scope="module", loop_scope="module")
async def run_browser() -> AsyncIterator[Browser]:
    """A browser, in the event loop that the tests of the file share."""
    async with browser() as chromium:
        yield chromium
