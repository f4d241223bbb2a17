"""How full a folder may be: what no reader can look over at a glance is several things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.tidy.tree import Source

FOLDER_FILES_MAX = 15
"""Of modules in one folder of what we ship, `__init__.py` not among them."""


def crowded_folders(sources: Iterable[Source]) -> list[str]:
    """Return each folder of source that holds too many modules, with how many."""
    paths = (PurePosixPath(source.name) for source in sources if source.in_package)
    counts = Counter(str(path.parent) for path in paths if path.name != "__init__.py")
    return [
        f"{folder}: {count} files; at most {FOLDER_FILES_MAX}"
        for folder, count in sorted(counts.items())
        if count > FOLDER_FILES_MAX
    ]
