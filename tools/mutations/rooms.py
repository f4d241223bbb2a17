"""Which tests are a source file's own: those of its room.

A mutant that only a test of the whole system kills is a line whose rule nobody wrote down where it
is kept. Both sides of a seam share tests/contracts.
"""

from __future__ import annotations

from pathlib import Path

ROOMS = (
    ("controller/", ("tests/controller", "tests/simulation", "tests/contracts")),
    ("worker/", ("tests/worker", "tests/contracts")),
    ("shared/mlxd_models/", ("tests/models", "tests/contracts")),
    ("shared/", ("tests/shared", "tests/contracts")),
    ("gateway/", ("tests/gateway", "tests/contracts")),
)
"""The first prefix that fits a source file names the folders of its tests."""


def room_of(source: str) -> tuple[str, ...]:
    """Return the folders of tests that a source file answers to. Raises ValueError for none."""
    for prefix, folders in ROOMS:
        if source.startswith(prefix):
            return folders
    raise ValueError(f"no room of tests is named for {source}: see ROOMS")


def test_files(root: Path) -> list[str]:
    """Return the test files of all rooms, in order."""
    folders = sorted({folder for _, folders in ROOMS for folder in folders})
    return [
        str(path.relative_to(root))
        for folder in folders
        for path in sorted((root / folder).rglob("test_*.py"))
    ]


def mirrors(test: str, source: str) -> bool:
    """Tell whether a test, or its file, is named after a source file.

    tests/worker/cache/test_trie.py and tests/worker/test_cache_trie.py are both named after
    worker/mlxd_worker/cache/trie.py.
    """
    name = Path(test.partition("::")[0]).stem.removeprefix("test_")
    path = Path(source)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    return name in {stem, f"{path.parent.name}_{stem}"} or name.startswith(f"{stem}_")
