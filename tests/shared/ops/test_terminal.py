"""Texts of others on a terminal."""

from __future__ import annotations

from mlxd_shared.ops.terminal import escape, escape_line, without_steering

TEXT = "a\x1b[2J\x07\x9b\x7f\r\tb\n\u00e9\u4e16"


def test_what_steers_a_terminal_is_left_out_or_shown() -> None:
    """Line ends and tabs pass where there may be lines; letters of all languages always do."""
    assert without_steering(TEXT) == "a[2J\tb\n\u00e9\u4e16"
    assert escape(TEXT) == "a\\x1b[2J\\x07\\x9b\\x7f\\x0d\tb\n\u00e9\u4e16"
    assert escape_line("a\n\tb") == "a\\x0a\\x09b"
