"""Kernels of our own: a function's body and what it is given, compiled once for each use.

MLX has its own headers compiled with each kernel, which takes a second and more, in every process
anew (decision 0080). Ours need none of them: the same body takes a twentieth of that.

Invariants:
- A kernel is compiled when it meets types and constants for the first time, unless a process
  before had the same source compiled by the same compiler, and kept it.
- Its name among MLX's modules says which source it was compiled from, so that no two share one.
- Where no compiler is found, or it refuses a source, MLX compiles that kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import mlx.core as mx

from mlxd_shared.ops.logs import get_logger
from mlxd_worker.kernels.code_files import CodeFiles, find_files
from mlxd_worker.kernels.device import Kernel
from mlxd_worker.kernels.nvrtc import HEADERS, CompileError, Compiler, find_compiler

Constant = tuple[str, int | mx.Dtype]
"""A constant or a type that a body refers to by its name."""

TYPES: Final = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
"""What CUDA calls the types that kernels here take."""

_log = get_logger("kernels")


@dataclass(frozen=True, slots=True)
class Body:
    """A kernel as it is written: all but its signature."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    text: str
    header: str = ""
    """Functions that it calls."""
    scalars: tuple[str, ...] = ()
    """Whole numbers that each call gives; MLX compiles no kernel that has any."""
    threads_max: int | None = None
    """Threads that a block has at most, where its registers must do for so many."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for some types and constants."""

    name: str
    """What it is launched as."""
    code: bytes
    """What a launch brings along: nothing, where the code lies in a file."""


class OwnKernel:
    """Compiles a body as it is called for. Engine thread."""

    def __init__(
        self,
        body: Body,
        *,
        find: Callable[[], Compiler | None] = find_compiler,
        find_files: Callable[[], CodeFiles | None] = find_files,
        launch: Kernel = mx.fast.precompiled_cuda_kernel,
        fall_back: Callable[[Body], Kernel] | None = None,
    ) -> None:
        """Compile `body` by what `find` returns; `fall_back` makes a kernel where that cannot."""
        self._body = body
        self._find = find
        self._find_files = find_files
        self._launch = launch
        self._fall_back = fall_back or have_mlx_compile
        self._compiled: dict[object, Compiled | None] = {}
        self._other: Kernel | None = None

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[Constant],
        scalars: Sequence[int] = (),
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Return the outputs, lazy; arguments as `mx.fast.cuda_kernel`'s, and the body's scalars.

        shared_memory: bytes that the body takes as `extern __shared__`; as scalars, of kernels that
        MLX does not compile.

        Raises:
            CompileError: a kernel that has scalars cannot be compiled here.
        """
        input_dtypes = tuple(array.dtype for array in inputs)
        key = (input_dtypes, tuple(output_dtypes), tuple(template))
        if key not in self._compiled:
            self._compiled[key] = self._compile(input_dtypes, output_dtypes, template)
        compiled = self._compiled[key]
        shared = partial(
            self._launch,
            inputs=list(inputs),
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            grid=grid,
            threadgroup=threadgroup,
        )
        if compiled is not None:
            return shared(
                name=compiled.name,
                compiled_source=compiled.code,
                scalars=list(scalars),
                shared_memory=shared_memory,
                ensure_row_contiguous=True,
            )
        if self._body.scalars:
            raise CompileError(f"{self._body.name}: nobody compiles this")
        if self._other is None:
            self._other = self._fall_back(self._body)
        return self._other(**shared.keywords, template=list(template))

    def _compile(
        self,
        input_dtypes: Sequence[mx.Dtype],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[Constant],
    ) -> Compiled | None:
        compiler = self._find()
        if compiler is None:
            return None
        text = source_of(self._body, input_dtypes, output_dtypes, template)
        symbol = f"mlxd_{self._body.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        source, files = text.replace(_SYMBOL, symbol), self._find_files()
        kept = None if files is None else files.find(symbol, source)
        if kept is not None:
            return Compiled(kept, b"")
        try:
            code = compiler.compile(source, name=symbol)
        except CompileError as error:
            _log.warning("MLX compiles a kernel", kernel=self._body.name, problem=str(error))
            return None
        name = None if files is None else files.put(symbol, source, code)
        return Compiled(symbol, code) if name is None else Compiled(name, b"")


_SYMBOL: Final = "KERNEL_SYMBOL"


def source_of(
    body: Body,
    input_dtypes: Sequence[mx.Dtype],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[Constant],
) -> str:
    """Return a kernel's source: inputs, outputs, scalars; constants first in the body. Pure."""
    inputs = zip(input_dtypes, body.inputs, strict=True)
    outputs = zip(output_dtypes, body.outputs, strict=True)
    taken = [f"const {TYPES[dtype]}* {name}" for dtype, name in inputs]
    taken += [f"{TYPES[dtype]}* {name}" for dtype, name in outputs]
    taken += [f"int {name}" for name in body.scalars]
    constants = "".join(f"  {_declare(name, value)}\n" for name, value in template)
    bounds = "" if body.threads_max is None else f"__launch_bounds__({body.threads_max}) "
    signature = f'extern "C" __global__ void {bounds}{_SYMBOL}({", ".join(taken)})'
    return f"{HEADERS}{body.header}{signature} {{\n{constants}{body.text}}}\n"


def _declare(name: str, value: int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {TYPES[value]};"


def have_mlx_compile(body: Body) -> Kernel:
    """Return a body as a kernel that MLX compiles, with its own headers."""
    kernel: Any = mx.fast.cuda_kernel(
        name=body.name,
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.text,
        header=body.header,
    )
    return cast("Kernel", kernel)
