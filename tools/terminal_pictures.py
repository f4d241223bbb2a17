"""Take the pictures of `mlxd top` and `mlxd fit` in docs/pictures, of a real server.

    python tools/terminal_pictures.py [FOLDER]

What a terminal shows is drawn as SVG by rich, without the fonts that rich would have a reader's
browser fetch. The server serves the demo model and a second name of it, with streams under way.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path

from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script finds what stands beside it, not the tests

from tests.support.served import serve  # noqa: E402
from tests.support.terminal import XTERM, Terminal, on_terminal  # noqa: E402

from mlxd import Client  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
DEMO = ROOT / "shared" / "mlxd_shared" / "demo_model"
SIZE = (96, 24)
STREAMS = 3
TOKENS_BEFORE = 200
"""How many tokens each stream has when the picture is taken: speeds are shown then."""
FOREIGN_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def svg_of(lines: Iterable[Iterable[Char]], title: str) -> str:
    """Return what a terminal shows as SVG."""
    console = Console(record=True, width=SIZE[0], file=io.StringIO(), legacy_windows=False)
    for line in lines:
        text = Text(no_wrap=True, overflow="crop")
        for style, cells in groupby(line, _style_of):
            text.append("".join(cell.data for cell in cells), style)
        console.print(text)
    # Without an id of its own the picture's names would be drawn anew every time.
    return FOREIGN_FONTS.sub("", console.export_svg(title=title, unique_id="mlxd"))


def _style_of(cell: Char) -> Style:
    return Style(
        color=_color_of(cell.fg), bgcolor=_color_of(cell.bg), bold=cell.bold, reverse=cell.reverse
    )


def _color_of(name: str) -> str | None:
    """Return rich's name of a terminal's colour: pyte says `brown`, and bare hexadecimal."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


@asynccontextmanager
async def streaming(address: str, model: str) -> AsyncIterator[None]:
    """Run streams around the body, which begins when each has some tokens."""
    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def read(event: asyncio.Event) -> None:
        async with Client(address) as client:
            while True:
                count = 0
                async with client.generate("Once", model=model, max_tokens=400) as stream:
                    async for _ in stream:
                        count += 1
                        if count == TOKENS_BEFORE:
                            event.set()
                event.set()

    tasks = [asyncio.create_task(read(event)) for event in begun]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def picture_top(address: str, model: str) -> str:
    """Return `mlxd top` beside streams."""
    async with (
        streaming(address, model),
        on_terminal("top", "--address", address, term=XTERM, size=SIZE) as terminal,
    ):
        await terminal.until_shown(lambda shown: "tokens/s" in shown)
        for _ in range(3):  # a rate needs two looks
            await _next_frame(terminal)
        svg = svg_of(terminal.cells, "mlxd top")
        terminal.type("q")
        await terminal.wait_ended()
    return svg


async def _next_frame(terminal: Terminal) -> None:
    before = terminal.screen
    await terminal.until_shown(lambda _: terminal.screen != before)


async def picture_fit(address: str, model: str) -> str:
    """Return `mlxd fit`, term by term."""
    command = ("fit", model, "--address", address)
    async with on_terminal(*command, term=XTERM, size=SIZE) as terminal:
        await terminal.wait_ended()
        return svg_of(terminal.cells, f"mlxd fit {model}")


async def main() -> None:
    """Take both."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    names = ("--model", f"demo={DEMO}", "--model", f"tales={DEMO}")
    async with serve(*names) as server:
        async with Client(server.address) as client:
            await client.complete("Once", model="tales", max_tokens=4)
        top = await picture_top(server.address, "demo")
        fit = await picture_fit(server.address, "demo")
    for name, svg in (("top", top), ("fit", fit)):
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
