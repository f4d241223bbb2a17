"""The table of docs/http.md is what the code says."""

from __future__ import annotations

import http_table


def test_the_table_is_made_from_the_code() -> None:
    """`python tools/http_table.py` would change nothing."""
    text = http_table.DOCUMENT.read_text(encoding="utf-8")
    assert http_table.with_tables(text) == text
    assert "| `best_of` | honoured | the likeliest by token, of up to 16 a prompt" in text
