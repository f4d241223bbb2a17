"""Formats of strings: exact where it matters, judged by hand and by JSON Schema's own tests."""

from __future__ import annotations

import json

import pytest

from mlxd_worker.constraints.patterns import whole_pattern
from mlxd_worker.constraints.string_formats import STRING_FORMATS
from tests.real_inputs import real_input
from tests.support.ecma import written_matches

# Valid texts that the expressions leave out on purpose.
LEFT_OUT = {
    ("email", '"joe bloggs"@example.com'),
    ("email", '"joe..bloggs"@example.com'),
    ("email", '"joe@bloggs"@example.com'),
    ("email", "joe.bloggs@[IPv6:::1]"),
    ("time", "15:59:60-08:00"),
    ("time", "01:29:60+01:30"),
    ("time", "23:29:60+23:30"),
    ("time", "00:29:60-23:30"),
    ("time", "15:59:60-08:00"),
    ("time", "01:29:60+01:30"),
    ("date-time", "1998-12-31T15:59:60.123-08:00"),
}


def is_of(name: str, text: str) -> bool:
    """Tell whether a text is of a format."""
    wanted = STRING_FORMATS[name]
    short = len(text) <= (wanted.chars_max or len(text))
    return short and written_matches(whole_pattern(wanted.pattern), text)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"],
         ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"]),
        ("time", ["23:59:60Z", "08:30:06.5+02:00"],
         ["24:00:00Z", "12:00:60Z", "08:30:06", "8:30:06Z"]),
        ("date-time", ["2024-02-29T23:59:59z"], ["2024-02-29 23:59:59Z", "2024-02-30T00:00:00Z"]),
        ("duration", ["P1Y2M3D", "PT0S", "P4W", "P1DT12H"], ["P", "PT", "P1S", "P1Y2W", "P1YT"]),
        ("email", ["a.b+c@example.com", "a@[127.0.0.1]"], ["a..b@c.d", "@c", "a@", ".a@b", "a@b-"]),
        ("hostname", ["a", "a-b.c1", "x" * 63], ["-a", "a-", "a..b", "x" * 64, "ab--cd", "a_b"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::"],
         [":", "1:2:3:4:5:6:7", "1::2::3", ":1:2:3:4:5:6:7:8", "12345::"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
        ("uri", ["http://a/b?c#d", "urn:x:y", "http://[::1]:80/"],
         ["//a/b", "a b", "http://[:1]/", "1http://a"]),
        ("uri-reference", ["", "/a", "a/b?c", "#d", "//h/p"], ["\\a", "a:b c", "#a#b"]),
        ("iri", ["http://ƒøø.ßår/?∂éœ"], ["http://a b", "/abc"]),
        ("json-pointer", ["", "/a~0b~1c", "/"], ["a", "/~2", "/~"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["-1", "/a", "01/a"]),
    ],
)  # fmt: skip
def test_a_format_holds_what_it_says(name: str, good: list[str], bad: list[str]) -> None:
    """Good texts match, and those that are nearly good do not."""
    assert [text for text in good if not is_of(name, text)] == []
    assert [text for text in bad if is_of(name, text)] == []


def test_the_suite_of_json_schema_agrees() -> None:
    """What matches is valid for JSON Schema's own tests; what is valid matches, but for a few."""
    folder = real_input("jsonschema/test-suite-2020-12/optional/format")
    tried = 0
    for name in STRING_FORMATS:
        (group, *_) = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for test in group["tests"]:
            if isinstance(test["data"], str) and (name, test["data"]) not in LEFT_OUT:
                assert is_of(name, test["data"]) == test["valid"], (name, test)
                tried += 1
    assert tried > 250
