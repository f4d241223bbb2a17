"""Machine code where MLX looks for it: what is written, into which folders, and the proof of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.kernels.code_files import (
    FOLDER_VARIABLE,
    NOTHING_DIGEST,
    CodeFiles,
    own_folder,
    prove,
)
from mlxd_worker.kernels.nvrtc import CompileError

VERSION = "0.32.4"
CODE = b"machine code"
SOURCE = "void kernel() {}"
TOOLCHAIN = "sm_90a"
DIGEST = hashlib.sha256(f"{TOOLCHAIN}\n{SOURCE}".encode()).hexdigest()[:16]
NAME = f"kernel_{DIGEST}"


def libstdcxx_digest(text: bytes) -> int:
    """Return `std::hash<std::string>` of fewer than eight bytes (libstdc++, hash_bytes.cc)."""
    multiplier, mask = (0xC6A4A793 << 32) + 0x5BD1E995, (1 << 64) - 1
    digest = 0xC70F6907 ^ (len(text) * multiplier & mask)
    if text:
        digest = (digest ^ int.from_bytes(text, "little")) * multiplier & mask
    digest = (digest ^ digest >> 47) * multiplier & mask
    return digest ^ digest >> 47


def test_code_lies_under_its_own_name_and_the_digest_of_nothing(tmp_path: Path) -> None:
    """By its source and by what compiled that, and never in half."""
    files = CodeFiles(tmp_path, toolchain=TOOLCHAIN)
    name, other = files.put("kernel", SOURCE, CODE), files.put("kernel", SOURCE + "!", CODE)

    assert name == NAME
    assert other not in (None, name)
    stem = f"{name}_{libstdcxx_digest(b''):x}"
    assert (tmp_path / f"{stem}.ptx").read_bytes() == CODE
    assert (tmp_path / f"{stem}.txt").read_text() == f"{name}\tkernel\n"
    assert len(list(tmp_path.iterdir())) == 6, "nothing else is left"


def test_a_later_process_finds_what_was_compiled(tmp_path: Path) -> None:
    """The same source by the same toolchain alone."""
    put = CodeFiles(tmp_path, toolchain=TOOLCHAIN).put("kernel", SOURCE, CODE)
    later = CodeFiles(tmp_path, toolchain=TOOLCHAIN)

    assert later.find("kernel", SOURCE) == put
    assert later.find("kernel", SOURCE + "!") is None
    assert later.find("other", SOURCE) is None
    assert CodeFiles(tmp_path, toolchain="sm_100").find("kernel", SOURCE) is None


@pytest.mark.parametrize("end", [".txt", ".ptx", ".sha256"])
@pytest.mark.parametrize("content", [None, b"", b"torn"])
def test_what_is_not_whole_is_compiled_anew(
    end: str, content: bytes | None, tmp_path: Path
) -> None:
    """Code, its digest and its names are all there, or it is as if nothing were."""
    files = CodeFiles(tmp_path, toolchain=TOOLCHAIN)
    files.put("kernel", SOURCE, CODE)
    part = tmp_path / f"{NAME}_{NOTHING_DIGEST:x}{end}"
    if content is None:
        part.unlink()
    else:
        part.write_bytes(content)

    assert files.find("kernel", SOURCE) is None
    assert files.put("kernel", SOURCE, CODE) == files.find("kernel", SOURCE) == NAME


def test_a_file_that_cannot_be_read_is_compiled_anew(tmp_path: Path) -> None:
    """A folder in its place ends nothing."""
    files = CodeFiles(tmp_path, toolchain=TOOLCHAIN)
    files.put("kernel", SOURCE, CODE)
    part = tmp_path / f"{NAME}_{NOTHING_DIGEST:x}.ptx"
    part.unlink()
    part.mkdir()

    assert files.find("kernel", SOURCE) is None


def test_the_digest_of_nothing_is_the_library_s() -> None:
    """By its own formula."""
    assert libstdcxx_digest(b"") == NOTHING_DIGEST


def test_a_folder_that_cannot_be_written_takes_no_code(tmp_path: Path) -> None:
    """The launch brings it along, and no half of a file stays."""
    gone = CodeFiles(tmp_path / "gone", toolchain=TOOLCHAIN)
    assert gone.put("kernel", SOURCE, CODE) is None
    (tmp_path / f"{NAME}_{NOTHING_DIGEST:x}.ptx").mkdir()
    assert CodeFiles(tmp_path, toolchain=TOOLCHAIN).put("kernel", SOURCE, CODE) is None
    there = sorted(path.suffix for path in tmp_path.iterdir() if path.is_file())
    assert there == [".sha256", ".txt"]


def test_only_a_folder_of_one_s_own_is_used(tmp_path: Path) -> None:
    """The one that is named, or MLX's own among temporary files; made where it is not."""
    named = tmp_path / "named"
    assert own_folder({FOLDER_VARIABLE: str(named)}, mlx_version=VERSION) == named
    assert named.is_dir()
    for mode in (0o777, 0o775):
        named.chmod(mode)
        assert own_folder({FOLDER_VARIABLE: str(named)}, mlx_version=VERSION) is None
    file = tmp_path / "file"
    file.touch()
    assert own_folder({FOLDER_VARIABLE: str(file / "below")}, mlx_version=VERSION) is None


def test_mlx_s_folder_is_where_its_source_has_it() -> None:
    """Among temporary files, by MLX's version."""
    version = f"test-{os.getpid()}"
    folder = own_folder({}, mlx_version=version)
    expected = Path(tempfile.gettempdir()) / "mlx" / version / "ptx"
    try:
        assert folder == expected
    finally:
        expected.rmdir()
        expected.parent.rmdir()


class Launcher:
    """Launches what it is given, and answers what a test wants."""

    def __init__(self, answer: int | RuntimeError) -> None:
        self.calls: list[dict[str, Any]] = []
        self._answer = answer

    def __call__(self, **arguments: Any) -> list[mx.array]:
        """Note a launch."""
        self.calls.append(arguments)
        if isinstance(self._answer, RuntimeError):
            raise self._answer
        return [mx.array([self._answer], mx.int32)]


class Compiling:
    """A compiler whose code is the source; or which refuses all."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self.toolchain = TOOLCHAIN

    def compile(self, source: str, *, name: str) -> bytes:
        """Return the source as the code."""
        assert name in source
        if self._refuses:
            raise CompileError(name)
        return source.encode()


@pytest.mark.parametrize(
    ("answer", "proved"), [(42, True), (41, False), (RuntimeError("no image"), False)]
)
def test_it_is_proved_by_a_launch_without_code(
    answer: int | RuntimeError, proved: bool, tmp_path: Path
) -> None:
    """What MLX does not find, or what does something else, is no proof."""
    launcher = Launcher(answer)

    assert prove(CodeFiles(tmp_path, toolchain=TOOLCHAIN), Compiling(), launcher) is proved
    (call,) = launcher.calls
    assert call["compiled_source"] == b""
    assert (tmp_path / f"{call['name']}_{NOTHING_DIGEST:x}.ptx").read_bytes()


def test_nothing_is_launched_where_no_file_can_be_written(tmp_path: Path) -> None:
    """There is nothing to prove."""
    launcher = Launcher(42)

    assert not prove(CodeFiles(tmp_path / "gone", toolchain=TOOLCHAIN), Compiling(), launcher)
    assert launcher.calls == []


def test_a_folder_is_made_for_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    """A group that may write new folders by default may not write this one, nor those above."""
    named = tmp_path / "above" / "named"
    before = os.umask(0o002)
    try:
        assert own_folder({FOLDER_VARIABLE: str(named)}, mlx_version=VERSION) == named
    finally:
        os.umask(before)
    assert {named.stat().st_mode & 0o777, named.parent.stat().st_mode & 0o777} == {0o755}


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o777, False), (0o1777, True)])
def test_who_may_replace_a_folder_above_may_replace_the_code(
    mode: int, used: bool, tmp_path: Path
) -> None:
    """Not where entries are their owners' alone, as among temporary files."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    named = above / "named"

    assert (own_folder({FOLDER_VARIABLE: str(named)}, mlx_version=VERSION) is not None) is used


def test_a_probe_that_is_refused_proves_nothing(tmp_path: Path) -> None:
    """The kernel that was asked for is launched with its code."""
    assert not prove(
        CodeFiles(tmp_path, toolchain=TOOLCHAIN), Compiling(refuses=True), Launcher(42)
    )
