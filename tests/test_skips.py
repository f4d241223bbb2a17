"""The rule about skips in CI, proved on a small suite that a real pytest runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.skips import parse_allowed

ROOT = Path(__file__).resolve().parents[1]
SUITE = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("size", [1])
def test_skips(size):
    pytest.skip("no such machine here")

@pytest.mark.xfail(strict=True)
def test_known_failure():
    raise AssertionError
"""


def run_suite(folder: Path, *, ci: bool, allowed: str) -> subprocess.CompletedProcess[str]:
    """Run SUITE in a pytest of its own under the plugin."""
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    (folder / "allowed.txt").write_text(allowed, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"CI": "true"} if ci else {})
    plugins = ["-p", "tests.plugins.skips", "-p", "no:cacheprovider", "-p", "no:randomly"]
    where = [f"--rootdir={folder}", "--allowed-skips", str(folder / "allowed.txt"), "."]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *where],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_unlisted_skip_fails_in_ci(tmp_path: Path) -> None:
    """A skip that the list lacks is a failure that names the test, its reason and the list."""
    done = run_suite(tmp_path, ci=True, allowed="")

    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 1 xfailed" in done.stdout
    assert "allowed.txt does not list it: test_suite.py::test_skips[1]" in done.stdout
    assert "no such machine here" in done.stdout


def test_a_listed_skip_passes_in_ci(tmp_path: Path) -> None:
    """A skip that the list names by pattern stays a skip."""
    done = run_suite(tmp_path, ci=True, allowed="*::test_skips[*] | this machine has one CPU\n")

    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout


def test_skips_are_free_outside_ci(tmp_path: Path) -> None:
    """On a developer's machine no list is needed."""
    done = run_suite(tmp_path, ci=False, allowed="")

    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout


def test_a_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    """A skip at import counts like any other."""
    whole = "import pytest\npytest.skip('no Node', allow_module_level=True)\n"
    (tmp_path / "test_whole.py").write_text(whole, encoding="utf-8")
    done = run_suite(tmp_path, ci=True, allowed="*::test_skips[1] | listed\n")

    assert done.returncode != 0, done.stdout
    assert "allowed.txt does not list it: test_whole.py" in done.stdout


@pytest.mark.parametrize(
    "line", ["tests/test_a.py::test_b", "tests/test_a.py | ", " | reason", "[linux] | b"]
)
def test_an_entry_needs_its_reason(line: str) -> None:
    """A line without a node id or a reason stops the run."""
    with pytest.raises(pytest.UsageError, match="line 1"):
        parse_allowed([line])


def test_an_entry_may_be_for_one_platform() -> None:
    """A name in brackets before the node id is the one platform that the entry is for."""
    lines = ["[darwin] a.py::test_x | no such package there", "a.py::test_y | anywhere"]

    here, there = (parse_allowed(lines, platform=name) for name in ("linux", "darwin"))
    assert [entry.pattern for entry in here] == ["a.py::test_y"]
    assert [entry.pattern for entry in there] == ["a.py::test_x", "a.py::test_y"]


def test_brackets_are_no_wildcards() -> None:
    """The brackets of a parametrised test match themselves alone."""
    (entry,) = parse_allowed(["a.py::test_x[gpu] | no GPU"])

    assert entry.covers("a.py::test_x[gpu]")
    assert not entry.covers("a.py::test_xg")


@pytest.mark.parametrize(
    "nodeid", ["a.py::test_x_more", "a.py::test_x[gpu]", "b/a.py::test_x", "a.py::test_"]
)
def test_an_entry_is_about_whole_node_ids(nodeid: str) -> None:
    """Neither a test whose name begins alike, nor one whose path ends alike, may skip with it."""
    (entry,) = parse_allowed(["a.py::test_x | no GPU"])

    assert entry.covers("a.py::test_x")
    assert not entry.covers(nodeid)
