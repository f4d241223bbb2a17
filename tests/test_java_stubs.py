"""The .proto files as a Java user meets them: stubs are generated and they compile.

protoc's Java plugin for gRPC and the jars come from `make tools`. Where they are missing these
tests skip; CI has them, and allows no skip.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROTOS = sorted((ROOT / "proto" / "mlxd" / "v1").glob("*.proto"))
TOOLS = ("protoc", "grpc_java_plugin", "javac")
JAR_FOLDER = Path("/usr/share/java")
JARS = (
    "geronimo-annotation-1.3-spec",
    "grpc-api",
    "grpc-protobuf",
    "grpc-stub",
    "guava",
    "protobuf",
)
PACKAGE = Path("dev", "mlxd", "v1")
TOOL_TIMEOUT_S = 170
LITTLE_WORK = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")
"""For Java's own compiler, which else optimises itself for longer than it runs."""


def run(*command: str) -> None:
    """Run a tool, which must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(name="sources", scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the generated package's root."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine; `make tools` installs them")
    out = tmp_path_factory.mktemp("java")
    run(
        "protoc",
        f"--proto_path={ROOT / 'proto'}",
        f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}",
        f"--java_out={out}",
        f"--grpc-java_out={out}",
        *map(str, PROTOS),
    )
    return out


@pytest.mark.parametrize("service", ["Inference", "Model", "Status", "Worker"])
def test_every_service_has_a_stub(sources: Path, service: str) -> None:
    """Each service becomes one class in the package that the files name."""
    assert (sources / PACKAGE / f"{service}ServiceGrpc.java").is_file()


def test_messages_are_classes_of_their_own(sources: Path) -> None:
    """Messages are top-level classes, and no file's own class takes the name of one."""
    assert (sources / PACKAGE / "Model.java").is_file()
    assert (sources / PACKAGE / "ModelProto.java").is_file()


def test_the_stubs_compile(sources: Path, tmp_path: Path) -> None:
    """A Java compiler accepts all of it against grpc-java and protobuf-java."""
    jars = [JAR_FOLDER / f"{name}.jar" for name in JARS]
    absent = [jar.name for jar in jars if not jar.is_file()]
    if absent:
        pytest.skip(f"no {', '.join(absent)} on this machine; `make tools` installs them")
    files = sorted(map(str, sources.rglob("*.java")))
    path = ":".join(map(str, jars))
    run("javac", *LITTLE_WORK, "-nowarn", "-proc:none", "-cp", path, "-d", str(tmp_path), *files)

    assert (tmp_path / PACKAGE / "InferenceServiceGrpc.class").is_file()
