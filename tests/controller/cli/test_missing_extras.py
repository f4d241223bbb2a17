"""What needs an extra is refused at the start, by name and with the remedy, where it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.disk_keys import write_key

PROGRAM = """
import sys

hidden = sys.argv.pop(1)

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
from mlxd_controller.cli import main
main()
"""
KEY = "KEY"
"""Stands for the path of a file with a key."""


@pytest.mark.parametrize(
    ("package", "extra", "options"),
    [
        ("smg_grpc_proto", "router", ["--router", "127.0.0.1:0"]),
        ("ray", "fleet", ["--fleet", "auto"]),
        ("starlette", "http", ["--http"]),
        ("cryptography", "cipher", ["--prefix-disk", "1G", "--prefix-disk-key", KEY]),
    ],
)
def test_a_server_does_not_start_without_it(
    package: str, extra: str, options: list[str], tmp_path: Path
) -> None:
    """In a process in which the package cannot be found; nothing is made before."""
    key = str(write_key(tmp_path / "key"))
    words = [key if word == KEY else word for word in options]
    address = ("--address", f"unix:{tmp_path}/s")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, "serve", *address, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"needs the extra {extra}: pip install 'mlxd[{extra}]'" in done.stderr
    assert not (tmp_path / "s").exists()
