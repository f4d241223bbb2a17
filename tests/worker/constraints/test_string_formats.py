"""Formats of strings: exact where it matters, judged by hand and by JSON Schema's own tests."""

from __future__ import annotations

import functools
import json

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.constraints.schema_values import LIBRARY_FORMATS, REFUSED_FORMATS, STRING_FORMATS
from mlxd_worker.engine.masks.constraint import Constraint
from tests.real_inputs import real_input
from tests.support.constrained import accepts, schema

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


@functools.cache
def constraint_of(name: str) -> Constraint:
    """Return the constraint of strings of a format."""
    return schema(json.dumps({"type": "string", "format": name}))


def is_of(name: str, text: str) -> bool:
    """Tell whether a text is of a format."""
    return accepts(constraint_of(name), json.dumps(text, ensure_ascii=False))


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
        ("ipv6", ["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:7::"],
         [":", "1:2:3:4:5:6:7", "1::2::3", ":1:2:3:4:5:6:7:8", "12345::"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
        ("uri", ["http://a/b?c#d", "urn:x:y", "http://[::1]:80/"],
         ["//a/b", "a b", "http://[:1]/", "1http://a"]),
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
    left_out: set[str] = set()
    for name in (*STRING_FORMATS, *LIBRARY_FORMATS):
        (group, *_) = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for test in group["tests"]:
            if isinstance(test["data"], str) and (name, test["data"]) not in LEFT_OUT:
                accepted = is_of(name, test["data"])
                assert accepted <= test["valid"], (name, test)
                left_out |= {name} if accepted != test["valid"] else set()
                tried += 1
    assert tried > 150
    assert left_out == {"ipv6"}, "but for those that end like an address of IPv4"


@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_what_is_not_held_is_refused_with_its_place(name: str) -> None:
    """A draft defines it, so that to leave it out would let through what is not of it."""
    with pytest.raises(InvalidRequest, match=f"#/items/format: the format '{name}' is not served"):
        schema(json.dumps({"items": {"format": name}}))
