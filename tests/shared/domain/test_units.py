"""Sizes and durations, as people write and read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_shared.config import DURATION_MAX_S
from mlxd_shared.domain.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512b", 512),
        ("2k", 2048),
        ("2 KB", 2048),
        ("10G", 10 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("1t", 1 << 40),
        ("0.5m", 1 << 19),
    ],
)
def test_a_size_is_powers_of_1024(text: str, nbytes: int) -> None:
    """K, KB and KiB all mean 1024, in either case; a bare number is bytes."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "1,5G", "ten", "1GG", "1 B B", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The message quotes the text and shows how to write it."""
    with pytest.raises(ValueError, match="is not a size; write for example 512M") as caught:
        parse_bytes(text)

    assert repr(text) in str(caught.value)


def test_a_size_beyond_all_numbers_is_refused() -> None:
    """As any other text that is none, and quoted in part."""
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_bytes("9" * 400)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1024.0 TiB"),
        (-64, "-64 B"),
        (-(1 << 20), "-1.0 MiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(nbytes: int, text: str) -> None:
    """One decimal from 1 KiB on; the sign stays."""
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 45))
def test_a_shown_size_can_be_read_back(nbytes: int) -> None:
    """What is printed can be typed, and is right to the digit that was printed."""
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300.0),
        ("0", 0.0),
        ("-0", 0.0),
        ("1.5", 1.5),
        ("90s", 90.0),
        ("1h2m3.5s", 3723.5),
        ("250ms", 0.25),
        (".5h", 1800.0),
        ("+5m", 300.0),
        ("-1", math.inf),
        ("-5m", math.inf),
        (" 7us ", 7e-6),
    ],
)
def test_a_duration_is_seconds_or_parts(text: str, seconds: float) -> None:
    """A bare number is seconds, parts add up, any negative duration is for ever, zero is zero."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-", "m", "5 m", "5x", "1h-2m", "nan", "inf", "1e999"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """Nonsense is never taken for a number; the message quotes it."""
    with pytest.raises(ValueError, match="is not a duration") as caught:
        parse_duration(text)

    assert repr(text) in str(caught.value)


def test_a_duration_beyond_every_date_is_refused() -> None:
    """Its end could not be told to a client; the message says how to write for ever."""
    assert parse_duration(f"{DURATION_MAX_S}s") == DURATION_MAX_S
    with pytest.raises(ValueError, match="write -1 for ever"):
        parse_duration("1e12")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (9.94, "9.9s"),
        (42.4, "42s"),
        (270, "4m30s"),
        (3599.9, "1h00m"),
        (3661, "1h01m"),
        (math.inf, "for ever"),
    ],
)
def test_a_duration_is_shown_briefly(seconds: float, text: str) -> None:
    """Two units at most, and never 60 of the smaller one."""
    assert format_duration(seconds) == text


@given(st.floats(0, 59.4))
def test_a_shown_duration_can_be_read_back(seconds: float) -> None:
    """What is printed can be typed."""
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=0.51)
