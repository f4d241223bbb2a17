"""The files of this tree as the rules see them: what git tracks or would track, read once.

Generated stubs and locks are nobody's style, so no rule sees them. Without git (an unpacked source
archive) the tree is walked and what is never committed is left out.
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("controller", "gateway", "worker", "shared")
CODE_SUFFIXES = {".py", ".pyi", ".proto", ".sh", ".js", ".mjs", ".cjs", ".ts", ".go", ".java"}
PROSE_SUFFIXES = {".md", ".toml", ".yaml", ".yml", ".cfg", ".ini"}
LOCKS = {"package-lock.json", "go.sum"}
VENDORED = ("gateway/mlxd_gateway/page/static/vendor/",)
NEVER_COMMITTED = {".git", ".venv", ".tools", "node_modules", "build", "dist", "__pycache__"}
TEXT_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Source:
    """One text file: its path from the root, with forward slashes, and its text."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its lines, without their ends."""
        return self.text.splitlines()

    @property
    def is_code(self) -> bool:
        """Whether people wrote it in a programming language."""
        path = Path(self.name)
        unnamed = not path.suffix and (path.name == "Makefile" or self.text.startswith("#!"))
        return path.suffix in CODE_SUFFIXES or unnamed

    @property
    def is_prose(self) -> bool:
        """Whether people wrote it, and not in a programming language."""
        return Path(self.name).suffix in PROSE_SUFFIXES

    @property
    def is_python(self) -> bool:
        """Whether it is Python that runs."""
        return self.name.endswith(".py")

    @property
    def in_package(self) -> bool:
        """Whether it is part of what we ship."""
        return self.name.split("/")[0] in PACKAGE_FOLDERS and self.is_python

    @property
    def in_tests(self) -> bool:
        """Whether it is part of the test suite."""
        return self.name.startswith("tests/") and self.is_python

    @property
    def module(self) -> str:
        """Its dotted name as an import sees it; only for a Python file of a package."""
        parts = Path(self.name).with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree; only for Python."""
        return ast.parse(self.text, filename=self.name)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of that tree."""
        return tuple(ast.walk(self.tree))

    def at(self, line: int, message: str) -> str:
        """Word a finding so that an editor can jump to it."""
        return f"{self.name}:{line}: {message}"


def is_generated(name: str) -> bool:
    """Tell whether a tool wrote the file, or others did, whose file it stays."""
    is_made = "_pb2" in Path(name).name or Path(name).name in LOCKS
    return is_made or name.startswith(VENDORED)


def names() -> list[str]:
    """Every file that is committed or would be, by its path from the root, sorted."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        paths = listed.decode().rstrip("\0").split("\0")
        return sorted(name for name in paths if (ROOT / name).is_file())
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if NEVER_COMMITTED.isdisjoint(path.parts))


def _text_of(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > TEXT_BYTES_MAX:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


@cache
def sources() -> tuple[Source, ...]:
    """Answer every text file of the tree that somebody wrote, sorted by name."""
    files = []
    for name in names():
        text = None if is_generated(name) else _text_of(ROOT / name)
        if text is not None:
            files.append(Source(name, text))
    return tuple(files)
