"""Kernels of our own are compiled once for each use, by a name of their own, or by MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.kernels.code_files import CodeFiles
from mlxd_worker.kernels.nvrtc import CompileError
from mlxd_worker.kernels.own import Body, OwnKernel, source_of

BODY = Body("twice", ("given",), ("made",), "  made[0] = 2 * given[0];\n")
SHAPE = (1,)


def find_no_files() -> CodeFiles | None:
    """Keep nothing: a machine with a GPU has a folder for real code."""
    return None


class Recording:
    """A compiler that keeps what it is asked, and refuses what holds `refused`."""

    def __init__(self, refused: str | None = None) -> None:
        self.sources: dict[str, str] = {}
        self.toolchain = "sm_90a"
        self._refused = refused

    def compile(self, source: str, *, name: str) -> bytes:
        """Return the source as the code."""
        if self._refused is not None and self._refused in source:
            raise CompileError("refused")
        self.sources[name] = source
        return source.encode()


class Launches:
    """What was launched, and by whom it was compiled."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.by_mlx = 0

    def launch(self, **arguments: Any) -> list[mx.array]:
        """Note a launch of compiled code."""
        self.calls.append(arguments)
        return [mx.zeros(shape) for shape in arguments["output_shapes"]]

    def fall_back(self, body: Body) -> Any:
        """Return a kernel that MLX compiles."""

        def launch(**arguments: Any) -> list[mx.array]:
            self.by_mlx += 1
            return [mx.zeros(shape) for shape in arguments["output_shapes"]]

        assert body is BODY
        return launch


def call(kernel: OwnKernel, *, dtype: mx.Dtype = mx.float32, factor: int = 1) -> None:
    """Call a kernel with one constant."""
    kernel(
        inputs=[mx.zeros(SHAPE, dtype=dtype)],
        output_shapes=[SHAPE],
        output_dtypes=[dtype],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        template=[("T", dtype), ("FACTOR", factor)],
    )


def test_a_kernel_is_compiled_once_for_its_types_and_constants() -> None:
    """The same again costs nothing; another type or constant is another kernel."""
    compiler, launches = Recording(), Launches()
    kernel = OwnKernel(
        BODY, find=lambda: compiler, find_files=find_no_files, launch=launches.launch
    )
    for _ in range(3):
        call(kernel)
    call(kernel, dtype=mx.bfloat16)
    call(kernel, factor=2)

    assert len(compiler.sources) == 3
    assert [call["name"] for call in launches.calls] == [
        *([next(iter(compiler.sources))] * 3),
        *list(compiler.sources)[1:],
    ]
    for each in launches.calls:
        assert each["compiled_source"] == compiler.sources[each["name"]].encode()


def test_kernels_of_one_name_and_other_texts_share_nothing() -> None:
    """MLX keeps modules by name: two bodies of one name must not be taken for each other."""
    compiler, launches = Recording(), Launches()
    other = Body(BODY.name, BODY.inputs, BODY.outputs, BODY.text.replace("2", "3"))
    for body in (BODY, other):
        call(
            OwnKernel(body, find=lambda: compiler, find_files=find_no_files, launch=launches.launch)
        )

    assert len(compiler.sources) == 2


@pytest.mark.parametrize("compiler", [None, Recording(refused="given")])
def test_mlx_compiles_where_we_cannot(compiler: Recording | None) -> None:
    """Without a compiler, or where it refuses a source, nothing fails."""
    launches = Launches()
    kernel = OwnKernel(
        BODY,
        find=lambda: compiler,
        find_files=find_no_files,
        launch=launches.launch,
        fall_back=launches.fall_back,
    )
    call(kernel)
    call(kernel)

    assert (launches.by_mlx, launches.calls) == (2, [])


def test_code_that_lies_in_a_file_is_not_brought_along(tmp_path: Path) -> None:
    """It is launched by the file's name; where none can be written, by its own, with the code."""
    compiler, launches = Recording(), Launches()
    for folder in (tmp_path, tmp_path / "gone"):
        files = CodeFiles(folder, toolchain=compiler.toolchain)
        kernel = OwnKernel(
            BODY,
            find=lambda: compiler,
            find_files=lambda files=files: files,  # type: ignore[misc]
            launch=launches.launch,
        )
        call(kernel)
        call(kernel)

    ((symbol, source),) = compiler.sources.items()
    named = [(each["name"], each["compiled_source"]) for each in launches.calls]
    kept = CodeFiles(tmp_path, toolchain=compiler.toolchain)
    short = (kept.put(symbol, source, source.encode()), b"")
    assert named == [short, short, (symbol, source.encode()), (symbol, source.encode())]


def test_what_a_process_before_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    """It is launched by the same name; another constant is another kernel."""
    compilers, launches = (Recording(), Recording()), Launches()
    for compiler in compilers:
        files = CodeFiles(tmp_path, toolchain=compiler.toolchain)
        kernel = OwnKernel(
            BODY,
            find=lambda compiler=compiler: compiler,  # type: ignore[misc]
            find_files=lambda files=files: files,  # type: ignore[misc]
            launch=launches.launch,
        )
        call(kernel)
    call(kernel, factor=2)

    assert [len(compiler.sources) for compiler in compilers] == [1, 1]
    first, second, third = (each["name"] for each in launches.calls)
    assert first == second != third


def test_a_kernel_with_scalars_needs_our_compiler() -> None:
    """MLX compiles none that has any: whoever calls it has asked first."""
    body = Body("scaled", ("given",), ("made",), "", scalars=("factor",))
    with pytest.raises(CompileError, match="scaled"):
        call(OwnKernel(body, find=lambda: None))


def test_a_launch_has_the_scalars_and_the_memory_that_its_caller_gives() -> None:
    """A block's shared memory is asked for beside its threads."""
    body = Body("scaled", ("given",), ("made",), "", scalars=("factor",))
    launches = Launches()
    OwnKernel(body, find=Recording, find_files=find_no_files, launch=launches.launch)(
        inputs=[mx.zeros(SHAPE)],
        output_shapes=[SHAPE],
        output_dtypes=[mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        template=[],
        scalars=[3],
        shared_memory=65_536,
    )

    (launched,) = launches.calls
    assert (launched["scalars"], launched["shared_memory"]) == ([3], 65_536)


def test_a_source_declares_what_its_body_refers_to() -> None:
    """Inputs, outputs and scalars in this order, then types, truths and numbers."""
    body = Body(
        "all", ("a", "b"), ("c",), "  c[0] = a[0];\n", header="int f();\n", scalars=("count",)
    )
    text = source_of(
        body,
        [mx.bfloat16, mx.int32],
        [mx.float16],
        [("T", mx.float16), ("WIDE", True), ("N", 7)],
    )

    assert "(const __nv_bfloat16* a, const int* b, __half* c, int count) {" in text
    assert 'int f();\nextern "C" __global__ void ' in text
    lines = ["using T = __half;", "constexpr bool WIDE = true;", "constexpr int N = 7;"]
    body_text = text.partition("{\n")[2]
    assert [line.strip() for line in body_text.splitlines()] == [*lines, "c[0] = a[0];", "}"]


def test_a_source_says_how_many_threads_its_registers_must_do_for() -> None:
    """Otherwise the compiler may give a thread more than a block of so many can have."""
    body = Body("bounded", (), ("made",), "", threads_max=512)

    assert "void __launch_bounds__(512) " in source_of(body, [], [mx.float32], [])
    assert "__launch_bounds__" not in source_of(BODY, [mx.float32], [mx.float32], [])
