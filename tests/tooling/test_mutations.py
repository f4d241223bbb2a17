"""Mutation testing, the drawing: what lines offer, what is left alone, what a seed repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutations.drawing import draw
from mutations.places import Places
from mutations.rooms import mirrors, room_of

SOURCE = "worker/small/parity.py"
TEXT = '''"""Numbers, even and odd."""


def is_even(number: int) -> bool:
    """Tell whether 2 divides it."""
    return number % 2 == 0


def above(number: int) -> list[int]:
    """Return what follows."""
    following = number + 1
    return [following]
'''


def changes(text: str) -> list[str]:
    """Return the lines that mutants of a text have in place of its own."""
    places = Places(SOURCE, text)
    diffs = [mutant.diff for line in places.lines for mutant in places.mutants(line)]
    return [line[1:].strip() for diff in diffs for line in diff.splitlines() if line[0] == "+"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a tree of one source file, and one of stubs, which is left alone."""
    for name in (SOURCE, "shared/mlxd/v1/types_pb2.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_a_draw_can_be_repeated(tree: Path) -> None:
    """The same seed draws the same mutants, another one draws others."""
    draws = [draw(tree, count=2, seed=seed) for seed in (1, 1, 2, 3, 4)]

    assert draws[0] == draws[1]
    assert any(other != draws[0] for other in draws[2:])


def test_each_line_is_drawn_once(tree: Path) -> None:
    """Whoever draws more than there is gets a mutant of each line that offers one."""
    drawn = draw(tree, count=99, seed=3)

    assert sorted((each.source, each.line) for each in drawn) == [(SOURCE, 6), (SOURCE, 11)]


@pytest.mark.parametrize(
    "text",
    [
        '"""Words."""',
        "from a import b",
        "a: int | None",
        "def f(a: 'int | None') -> 'str | None': ...",
        "@dataclass(frozen=True, slots=True)\nclass A: ...",
        "class A(Protocol):\n    a: int = 3",
        "__all__ = ['a']",
        "class A:\n    __slots__ = ('a',)",
        "if TYPE_CHECKING:\n    a = 1",
        "A: TypeAlias = B | C",
        "log.info('started', port=1)",
        "self._log.warning('odd', path=path)",
        "assert a > 0, a",
        "mx.eval(weight, bias)",
        "message = 'no such file'",
        "message = f'{path} is no file'",
        "raise ValueError(f'{count + 1} are too many')",
        "f'{path}' ' is no file'",
        "QUEUE_MAX = 4 * 1024",
        "READ_BYTES = 4096",
        "cast('int', b)",
        "WAIT_S = 2",
        "if __name__ == '__main__':\n    a = 1",
    ],
)
def test_what_no_test_can_tell_is_left_alone(text: str) -> None:
    """Types, texts for people, declarations and chosen numbers offer no mutant."""
    assert changes(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("message = read(3)", "message = read(4)"),
        ("path = f'{folder(1)}/{name}.json'", "path = f'{folder(2)}/{name}.json'"),
        ("key = f'{first(1)}' 'XXL'", "key = f'{first(2)}' 'XXL'"),
        ("split = re.compile(r'a +b')", "split = re.compile(r'XXa +bXX')"),
        ("HEAD_BYTES = 8", "HEAD_BYTES = 9"),
        ("_UNKNOWN_BYTES = (1 << 64) - 1", "_UNKNOWN_BYTES = (1 << 64) + 1"),
        (
            "def f(a: Annotated[str, Option('--a')]): ...",
            "def f(a: Annotated[str, Option('--A')]): ...",
        ),
        ("pairs = zip(a, b, strict=False)", "pairs = zip(a, b, strict=True)"),
        ("ids = cast('list[int]', tokens(1))", "ids = cast('list[int]', tokens(2))"),
        ("if TYPE_CHECKING:\n    a = 1\nelse:\n    a = 2", "a = 3"),
    ],
)
def test_what_only_looks_like_it_is_mutated(text: str, expected: str) -> None:
    """A name that texts have too, a path, a pattern, a format's sizes, a command's flags decide."""
    assert expected in changes(text)


def test_what_decides_is_mutated() -> None:
    """Comparisons, numbers, operators, arguments and names of fields all offer mutants."""
    mutants = changes("if a < limit + 1:\n    send(a, 'name', strict=True)")

    assert {"if a <= limit + 1:", "if a < limit - 1:", "if a < limit + 2:"} <= set(mutants)
    assert {"send(None, 'name', strict=True)", "send(a, 'XXnameXX', strict=True)"} <= set(mutants)
    assert not [line for line in mutants if "strict=True" not in line and "send" in line]


def test_a_statement_is_reached_by_all_its_lines() -> None:
    """The line that is wrong may be one in the middle of those that coverage.py sees."""
    (mutant, *_) = Places(SOURCE, "a = f(\n    b,\n    1,\n)").mutants(3)

    assert (mutant.line, mutant.reached_by) == (3, range(1, 5))


def test_what_does_not_compile_is_no_mutant() -> None:
    """mutmut makes `break` a `return`; outside a function there is none."""
    assert "return" not in changes("for a in b:\n    break")


def test_every_source_has_a_room() -> None:
    """The first prefix counts, both sides of a seam have the contracts, and no file is roomless."""
    assert "tests/simulation" in room_of("controller/mlxd_controller/core/schedule.py")
    assert "tests/contracts" in room_of(SOURCE)
    with pytest.raises(ValueError, match=r"elsewhere/a\.py"):
        room_of("elsewhere/a.py")


@pytest.mark.parametrize(
    ("test", "source", "mirrored"),
    [
        (
            "tests/worker/test_cache_trie.py::test_a",
            "worker/mlxd_worker/cache/trie.py",
            True,
        ),
        (
            "tests/worker/cache/test_trie_programs.py",
            "worker/mlxd_worker/cache/trie.py",
            True,
        ),
        ("tests/controller/launcher/test_launcher.py", "controller/a/launcher/__init__.py", True),
        ("tests/worker/test_tries.py", "worker/mlxd_worker/cache/trie.py", False),
    ],
)
def test_a_test_is_named_after_its_source(test: str, source: str, *, mirrored: bool) -> None:
    """By the file, by its folder and the file, or by the file and what of it is tested."""
    assert mirrors(test, source) is mirrored
