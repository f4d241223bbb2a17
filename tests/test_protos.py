"""The wire as files: lint, no break against the promised baseline, options, fresh stubs.

buf comes from `make tools`. Where it is missing these tests skip; CI has it, and allows no skip.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "proto" / "baseline.binpb"
PROTOS = sorted(path.relative_to(ROOT / "proto") for path in ROOT.glob("proto/mlxd/v1/*.proto"))
TOOL_TIMEOUT_S = 60


@pytest.fixture(name="buf")
def find_buf() -> str:
    """Find buf where `make tools` puts it, or on PATH."""
    path = shutil.which("buf", path=str(ROOT / ".tools" / "bin")) or shutil.which("buf")
    if path is None:
        pytest.skip("no buf on this machine; `make tools` installs it")
    return path


@pytest.fixture(name="workspace")
def copy_protos(tmp_path: Path) -> Path:
    """Copy the module and its settings, for a test to change."""
    shutil.copytree(ROOT / "proto" / "mlxd", tmp_path / "proto" / "mlxd")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a tool and keep what it says."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )


def edit(workspace: Path, name: str, before: str, after: str) -> None:
    """Change one file of the copy; the text to change must be there."""
    path = workspace / "proto" / "mlxd" / "v1" / name
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def test_the_protos_pass_buf_lint(buf: str) -> None:
    """Every file keeps buf's STANDARD rules."""
    done = run(buf, "lint")

    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_breaks_the_baseline(buf: str) -> None:
    """A client made from the promised protos still works."""
    done = run(buf, "breaking", "--against", str(BASELINE))

    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_sees_a_bad_name(buf: str, workspace: Path) -> None:
    """Lint is on: a message outside the naming rules is refused."""
    edit(
        workspace,
        "types.proto",
        "message SamplingOptions",
        "message sampling_options {}\n\nmessage SamplingOptions",
    )
    done = run(buf, "lint", folder=workspace)

    assert done.returncode != 0
    assert "sampling_options" in done.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optional float temperature = 1;", "optional float temperature = 1001;"),
        ("optional float temperature = 1;", "optional double temperature = 1;"),
        ("optional float temperature = 1;", ""),
    ],
    ids=["renumbered", "retyped", "removed"],
)
def test_a_break_is_caught(buf: str, workspace: Path, before: str, after: str) -> None:
    """A field that is renumbered, retyped or removed fails the breaking check."""
    edit(workspace, "types.proto", before, after)
    done = run(buf, "breaking", "--against", str(BASELINE), folder=workspace)

    assert done.returncode != 0
    assert "types.proto" in done.stdout


def test_a_removed_rpc_is_caught(buf: str, workspace: Path) -> None:
    """A method that goes away fails the breaking check."""
    edit(workspace, "inference.proto", "  rpc Embed(EmbedRequest) returns (EmbedResponse);\n", "")
    done = run(buf, "breaking", "--against", str(BASELINE), folder=workspace)

    assert done.returncode != 0
    assert "Embed" in done.stdout


def test_an_addition_is_no_break(buf: str, workspace: Path) -> None:
    """A new field may be added at any time."""
    field = "optional float temperature = 1;"
    edit(workspace, "types.proto", field, f"{field}\n  optional float added_later = 1001;")
    done = run(buf, "breaking", "--against", str(BASELINE), folder=workspace)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("proto", PROTOS, ids=str)
def test_every_file_says_where_its_code_goes(proto: Path) -> None:
    """Go, Java and C# users generate without options of their own."""
    module = importlib.import_module(str(proto.with_suffix("")).replace("/", ".") + "_pb2")
    descriptor: FileDescriptor = module.DESCRIPTOR
    options = descriptor.GetOptions()

    assert descriptor.package == "mlxd.v1"
    assert options.go_package.endswith("/mlxd/v1;mlxdv1")
    assert options.java_package == "dev.mlxd.v1"
    assert options.java_multiple_files
    assert options.csharp_namespace == "Mlxd.V1"


def test_the_stubs_are_fresh() -> None:
    """The committed stubs are what the protos make today, byte for byte."""
    done = run(sys.executable, str(ROOT / "tools" / "generate_protos.py"), "--check")

    assert done.returncode == 0, done.stdout + done.stderr
