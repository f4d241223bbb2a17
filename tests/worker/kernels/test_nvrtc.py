"""CUDA's run-time compiler: where it and its headers are found, and what becomes of a source."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from mlxd_worker.kernels.nvrtc import (
    HEADER,
    HEADER_FILES,
    CompileError,
    Device,
    Nvrtc,
    find_headers,
    find_mapped,
    make_compiler,
)

CODE, LOG = b"machine code", b"line 1: nonsense"
MAPS = """\
7f00-7f01 r-xp 00000000 08:01 17 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 18 /opt/nvidia/cu13/lib/libnvrtc-builtins.so.13.0
7f04-7f05 r-xp 00000000 08:01 19 /opt/nvidia/cu13/lib/libnvrtc.so.13
7f06-7f07 rw-p 00000000 00:00 0
"""


class Library:
    """Answers as the compiler's library does; fails to compile what holds a given text."""

    def __init__(self, refused: bytes = b"nonsense") -> None:
        self._refused = refused
        self.options: list[bytes] = []
        self.programs = 0
        self._source = b""

    def nvrtcCreateProgram(self, program: Any, source: bytes, *rest: Any) -> int:  # noqa: N802
        """Begin."""
        self.programs += 1
        self._source = source
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        """Compile."""
        self.options = list(options)
        return int(self._refused in self._source)

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        """End."""
        self.programs -= 1
        return 0

    def __getattr__(self, name: str) -> Any:
        """Return the functions that give the code and the log, and their sizes."""
        kept = LOG if "Log" in name else CODE

        def tell(program: Any, held: Any) -> int:
            if name.endswith("Size"):
                held._obj.value = len(kept)
            else:
                ctypes.memmove(held, kept, len(kept))
            return 0

        return tell


@pytest.fixture(name="installed")
def install(tmp_path: Path) -> Path:
    """Return a file that stands for the library, beside headers."""
    for name in HEADER_FILES:
        (tmp_path / name).touch()
    library = tmp_path / "libnvrtc.so.13"
    library.touch()
    return library


def compiler(library: Any) -> Nvrtc:
    """Return a compiler by this library."""
    return Nvrtc(library, include=Path("/include"), architecture="sm_90", installed="13.0")


def test_a_source_becomes_code_for_the_architecture() -> None:
    """Headers are looked for where they were found, and nothing is left behind."""
    library = Library()

    assert compiler(library).compile("void f() {}", name="f") == CODE
    assert [Device(each, 0).architecture for each in (80, 90, 100)] == ["sm_80", "sm_90a", "sm_100"]
    assert library.options == [b"--gpu-architecture=sm_90", b"--include-path=/include"]
    assert library.programs == 0


def test_what_is_refused_says_why() -> None:
    """The error has the kernel's name and the compiler's own words."""
    library = Library()
    with pytest.raises(CompileError, match="odd: line 1: nonsense"):
        compiler(library).compile("nonsense", name="odd")

    assert library.programs == 0


@pytest.mark.parametrize(("refused", "serves"), [(b"nonsense", True), (b"cuda_fp16.h", False)])
def test_a_library_that_does_not_serve_the_device_is_no_compiler(
    refused: bytes, serves: bool, installed: Path
) -> None:
    """It is asked once, before any kernel relies on it; nor is one that cannot be loaded."""
    library: Any = Library(refused)
    made = make_compiler(
        installed, include=installed.parent, architecture="sm_90", load=lambda _: library
    )
    assert (made is not None) == serves
    assert library.programs == 0

    def fail(path: str) -> Any:
        raise OSError(path)

    include = installed.parent
    assert make_compiler(installed, include=include, architecture="", load=fail) is None
    (include / HEADER).unlink()
    made = make_compiler(installed, include=include, architecture="", load=lambda _: library)
    assert made is None


def test_another_device_library_or_header_is_another_toolchain(installed: Path) -> None:
    """What one has compiled, no other takes for its own; the same one does, again."""
    library: Any = Library()

    def toolchain(architecture: str = "sm_90") -> str:
        made = make_compiler(
            installed,
            include=installed.parent,
            architecture=architecture,
            load=lambda _: library,
        )
        assert made is not None
        return made.toolchain

    first = toolchain()
    assert toolchain() == first
    seen = {first, toolchain("sm_90a")}
    bodies = [str(Path(name).with_suffix(".hpp")) for name in HEADER_FILES]
    beside = [installed.parent / name for name in (*HEADER_FILES, *bodies, "libnvrtc-builtins.so")]
    for number, path in enumerate((installed, *beside)):
        path.write_text("later" * (number + 1))
        seen.add(toolchain())
    assert len(seen) == 2 + 1 + len(beside)


def test_the_library_is_the_one_that_is_loaded() -> None:
    """Not the one of its built-in functions, which has nearly the same name."""
    assert find_mapped(MAPS) == Path("/opt/nvidia/cu13/lib/libnvrtc.so.13")
    assert find_mapped(MAPS.replace("libnvrtc.so", "other.so")) is None


@pytest.mark.parametrize(
    ("home", "environ"),
    [
        ("toolkit", {"CUDA_HOME": "toolkit"}),
        ("toolkit", {"CUDA_PATH": "toolkit"}),
        ("nvidia/cu13", {}),
        ("nvidia/cuda_runtime", {"CUDA_HOME": "elsewhere"}),
    ],
)
def test_headers_are_found_where_toolkits_and_wheels_have_them(
    tmp_path: Path, home: str, environ: dict[str, str]
) -> None:
    """The environment names a toolkit; wheels lie beside the library."""
    folder = tmp_path / home / "include"
    folder.mkdir(parents=True)
    (folder / HEADER).touch()
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    environ = {name: str(tmp_path / value) for name, value in environ.items()}

    assert find_headers(library, environ) == folder
