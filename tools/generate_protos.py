"""Make the committed stubs under shared/mlxd/v1 from proto/mlxd/v1.

Run as `make proto`. CI runs it with --check, which compares instead of writing.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "proto" / "mlxd" / "v1").glob("*.proto"))
TARGET = ROOT / "shared" / "mlxd" / "v1"


def generate(out: Path) -> None:
    """Write messages, services and their type stubs below `out`."""
    well_known = resources.files("grpc_tools") / "_proto"
    command = [
        sys.executable, "-m", "grpc_tools.protoc",
        f"-I{ROOT / 'proto'}", f"-I{well_known}",
        f"--python_out={out}", f"--grpc_python_out={out}",
        f"--mypy_out={out}", f"--mypy_grpc_out={out}",
        f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
        *map(str, PROTOS),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def differences(generated: Path) -> list[str]:
    """Name the files that differ between `generated` and the committed stubs."""
    names = {p.name for p in generated.iterdir()} | {p.name for p in TARGET.glob("*_pb2*")}
    return sorted(
        name
        for name in names
        if not (generated / name).is_file()
        or not (TARGET / name).is_file()
        or not filecmp.cmp(generated / name, TARGET / name, shallow=False)
    )


def main() -> int:
    """Generate, or with --check compare; exit 1 when the committed stubs are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check: bool = parser.parse_args().check
    if not check:
        TARGET.mkdir(exist_ok=True)
        generate(TARGET.parent.parent)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differences(Path(folder) / "mlxd" / "v1")
    for name in stale:
        print(f"stale stub: shared/mlxd/v1/{name} (run `make proto`)")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
