"""Pictures of a terminal: what is drawn is what was shown, and nothing is fetched to see it."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pyte

from terminal_pictures import svg_of

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_the_text_and_its_colours_and_no_fonts_of_others() -> None:
    """Named and free colours, on text and behind it."""
    screen = pyte.Screen(20, 2)
    pyte.Stream(screen).feed("\x1b[32mready\x1b[0m \x1b[38;2;1;2;3mfree\x1b[0m \x1b[33mqueued")
    svg = svg_of([[screen.buffer[0][x] for x in range(20)]], "mlxd top")

    texts = [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"ready", "free", "queued", "mlxd\xa0top"} <= {(text or "").strip() for text in texts}
    assert "#010203" in svg
    assert "@font-face" not in svg
    assert "https://" not in svg.replace("https://www.textualize.io", "")


def test_two_pictures_of_one_screen_are_the_same_file() -> None:
    """A picture that is taken again changes where the screen does, and nowhere else."""
    screen = pyte.Screen(5, 1)
    pyte.Stream(screen).feed("\x1b[1mmlxd")
    cells = [[screen.buffer[0][x] for x in range(5)]]
    assert svg_of(cells, "one") == svg_of(cells, "one")
