"""A private copy of the tree with an interpreter of its own, so that the tree is never mutated.

Tests start programs with `sys.executable`, some with an environment of their own. The copy's
interpreter therefore finds the copy's packages by itself, through its site-packages: whatever a
test starts runs the copy's code, mutated or not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("controller", "worker", "shared", "gateway")
EDITABLE = "_editable_impl_mlxd.pth"
"""How an editable install says where the packages lie; the copy says it for itself."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tree: where it is, and the interpreter that runs it."""

    root: Path
    python: Path

    def environment(self) -> dict[str, str]:
        """Return what commands in the copy get: nothing in it leads back to the tree itself."""
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return inherited | {"PYTHONPATH": str(self.root / "tools")}

    @contextmanager
    def holding(self, name: str, text: str, *, changed_s: int) -> Iterator[None]:
        """Have the file called `name` hold `text` until the block ends, however it ends.

        `changed_s`, the time of the change, is to be another one for each text: compiled files
        are told apart by it and by the length of the source.
        """
        path = self.root / name
        original, status = path.read_bytes(), path.stat()
        path.write_text(text, encoding="utf-8")
        os.utime(path, (changed_s, changed_s))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def make_copy(tree: Path, place: Path) -> Copy:
    """Copy what git tracks or would track in `tree` to `place`, with an interpreter beside it."""
    root = place / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = tree / name, root / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return Copy(root, _make_interpreter(root, place / "venv"))


def _make_interpreter(root: Path, venv: Path) -> Path:
    """Make an environment with this interpreter's libraries and the copy's own packages."""
    base = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(venv)]
    subprocess.run(base, check=True, capture_output=True)
    site = venv / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in {EDITABLE, "__pycache__"}:
            (site / entry.name).symlink_to(entry)
    paths = [str(root / folder) for folder in PACKAGE_FOLDERS if (root / folder).is_dir()]
    (site / EDITABLE).write_text("\n".join(paths) + "\n", encoding="utf-8")
    _copy_commands(Path(sys.executable).parent, venv / "bin")
    return venv / "bin" / "python"


def _copy_commands(source: Path, target: Path) -> None:
    """Copy the commands that stand beside this interpreter; those in Python run by the new one."""
    for command in source.iterdir():
        copied = target / command.name
        if copied.exists() or command.is_symlink() or not command.is_file():
            continue
        shutil.copy2(command, copied)
        head = copied.read_bytes()
        own = b"#!" + str(source).encode() + b"/python"
        if head.startswith(own):
            copied.write_bytes(head.replace(own, b"#!" + str(target).encode() + b"/python", 1))
