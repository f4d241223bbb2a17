"""A machine without a C++ compiler: every other program of PATH, and an empty home and caches."""

from __future__ import annotations

import os
import re
from pathlib import Path

_COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cpp)(-\d+)?$")


def without_compiler(folder: Path) -> dict[str, str]:
    """Return an environment whose PATH has no compiler and whose caches are empty."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for place in os.environ["PATH"].split(os.pathsep):
        if not Path(place).is_dir():
            continue
        for program in Path(place).iterdir():
            link = programs / program.name
            if not _COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    fresh = {name: str(folder / name.lower()) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for path in fresh.values():
        Path(path).mkdir()
    return {"PATH": str(programs), **fresh}
