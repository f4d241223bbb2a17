"""The style of the tree, kept by a test: each rule of tests/tidy over every file, and proof that
each rule sees what it is there to see.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tidy.folders import FOLDER_FILES_MAX, crowded_folders
from tests.tidy.imports import unreachable
from tests.tidy.rules import RULES, Rule
from tests.tidy.tree import ROOT, Source, is_generated, sources

BAD_FUNCTION = 'def long():\n    """Do."""\n' + "    pass\n" * 70
HEAD = '"""A file."""\n'

# rule, file name, text that breaks it, line of the finding
BREACHES = [
    ("file_length", "worker/a.py", "pass\n" * 401, 400),
    ("file_length", "proto/a.proto", "// a\n" * 401, 400),
    ("columns", "Makefile", "#" * 101, 1),
    ("columns", "tools/go", "#!/bin/sh\n" + "#" * 101, 2),
    ("function_length", "worker/a.py", BAD_FUNCTION, 1),
    ("banned_words", "docs/a.md", "text\nTO" + "DO later", 2),
    ("banned_words", "worker/a.py", "# FIX" + "ME", 1),
    ("local_paths", "a.json", '{"path": "/ro' + 'ot/models"}', 1),
    ("local_paths", "docs/a.md", "see /wo" + "rk/x", 1),
    ("dynamic_tricks", "tests/a.py", "has" + "attr(x, 'y')", 1),
    ("prose_columns", "docs/a.md", f"```\n```\n{'a' * 121}", 3),
    ("dynamic_tricks", "worker/a.py", "a = 1\nglob" + "als()['a']", 2),
    ("file_docstring", "worker/a.py", "a = 1", 1),
    ("file_docstring", "tests/__init__.py", "", 1),
    ("rule_of_each_test", "tests/test_a.py", "def test_b():\n    pass", 1),
    ("sleeping_tests", "tests/test_a.py", "import time\ntime.sle" + "ep(1)", 2),
    ("sleeping_tests", "tests/test_a.py", "await asyncio.sle" + "ep(0.1)", 1),
    ("patching_tests", "tests/test_a.py", "monkeypatch.setat" + "tr(a, 'b', c)", 1),
    ("vague_names", "worker/a.py", "def f(a, *, told=1): ...", 1),
    ("vague_names", "tests/a.py", "a = 1\nfor it in a: ...", 2),
    ("vague_names", "tools/a.py", "def f():\n    self._found = 1", 2),
    ("vague_names", "worker/a.py", "def asked(): ...", 1),
    ("participles", "worker/a.py", "def _rendered(): ...", 1),
    ("participles", "tests/a.py", "class A:\n    async def held(self): ...", 2),
]
# rule, file name, text that looks like a breach and is none
INNOCENTS = [
    ("file_length", "a.json", "{}\n" * 401),
    ("columns", "README.md", "a" * 200),
    ("prose_columns", "README.md", f"| {'a' * 200} |\n```\n{'a' * 200}\n```"),
    ("prose_columns", "worker/a.py", "a" * 200),
    ("function_length", "worker/a.py", BAD_FUNCTION.replace("    pass\n", "", 2)),
    ("banned_words", "tools/go", "#!/bin/sh\nmktemp /tmp/" + "X" * 6),
    (
        "local_paths",
        "docs/a.md",
        "https://example.org/home/ and ../wo" + "rk/x and $HOME/ho" + "me/",
    ),
    ("dynamic_tricks", "worker/a.py", "self.has" + "attr(x)"),
    ("sleeping_tests", "tests/test_a.py", "await asyncio.sleep(0)"),
    ("sleeping_tests", "worker/a.py", "await asyncio.sle" + "ep(1)"),
    ("vague_names", "tests/a.py", "from hypothesis import given\n@given(a)\ndef f(a): ..."),
    ("vague_names", "shared/mlxd_shared/domain/errors.py", "class A:\n    asked: str"),
    ("participles", "worker/a.py", "def embed(): ...\ndef fed_by(): ..."),
    ("participles", "worker/a.py", "class A:\n    @property\n    def held(self): ..."),
    ("participles", "tests/conftest.py", "@pytest.fixture\ndef built(): ..."),
]


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """Millions of nodes that are kept would make each later collection of garbage slow."""
    yield
    sources.cache_clear()


def rule_named(name: str) -> Rule:
    """Look a rule up by the name of its function."""
    return {rule.__name__: rule for rule in RULES}[name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    """No file of the tree breaks the rule."""
    findings = [finding for source in sources() for finding in rule(source)]

    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("name", "path", "text", "line"), BREACHES)
def test_a_breach_is_found(name: str, path: str, text: str, line: int) -> None:
    """Each rule finds its breach, at the line where it is."""
    (finding,) = rule_named(name)(Source(path, text))

    assert finding.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(("name", "path", "text"), INNOCENTS)
def test_no_false_alarm(name: str, path: str, text: str) -> None:
    """What only looks like a breach is left alone."""
    assert list(rule_named(name)(Source(path, text))) == []


def test_every_rule_is_proved() -> None:
    """No rule is without a breach that it finds."""
    assert {name for name, *_ in BREACHES} == {rule.__name__ for rule in RULES}


def test_no_module_is_dead() -> None:
    """Every module of the packages is reached from an entry point or the public client."""
    dead = unreachable(sources())

    assert not dead, "\n" + "\n".join(s.at(1, "nothing that runs imports it") for s in dead)


def test_a_dead_module_is_found() -> None:
    """Imports decide: a package file that only its dead sibling imports is dead too."""
    client = Source("shared/mlxd/client.py", "from mlxd import used")
    used = Source("shared/mlxd/used.py", "")
    dead = Source("shared/mlxd/dead.py", "import mlxd.deader")
    deader = Source("shared/mlxd/deader.py", "")

    assert unreachable([client, used, dead, deader]) == [dead, deader]


def test_no_folder_is_crowded() -> None:
    """A folder of source holds few enough files to be looked over."""
    crowded = crowded_folders(sources())

    assert not crowded, "\n" + "\n".join(crowded)


def test_a_crowded_folder_is_found() -> None:
    """Modules are counted a folder; tests and `__init__.py` are not."""
    full = [Source(f"worker/a/m{number}.py", "") for number in range(FOLDER_FILES_MAX)]
    others = [Source("worker/a/__init__.py", ""), Source("worker/b/m.py", "")]
    others += [Source(f"tests/a/m{number}.py", "") for number in range(FOLDER_FILES_MAX + 1)]

    assert crowded_folders(full + others) == []
    (finding,) = crowded_folders([*full, *others, Source("worker/a/one_more.py", "")])
    assert finding.startswith(f"worker/a: {FOLDER_FILES_MAX + 1} files")


def test_every_test_folder_is_a_package() -> None:
    """Two test files of one name never meet, and `from tests...` works from any folder."""
    files = [ROOT / source.name for source in sources() if source.in_tests]
    bare = {file.parent for file in files if not (file.parent / "__init__.py").is_file()}

    assert not bare, f"no __init__.py in: {sorted(str(path.relative_to(ROOT)) for path in bare)}"


def test_the_tree_is_seen() -> None:
    """The rules see packages, tests, scripts, protos and prose, and no generated file."""
    names = {source.name for source in sources()}

    wanted = {"shared/mlxd/__init__.py", "tests/test_tidy.py", "Makefile", ".ci/run", "README.md"}
    assert wanted | {"proto/mlxd/v1/types.proto", "pyproject.toml", "tools/node/install"} <= names
    assert not any(is_generated(name) for name in names)
