"""Machine code that lies where MLX looks for it, for launches and for processes that come later.

MLX 0.32.4 digests all of a kernel's machine code at each launch: 9 us of the host for 45 KB. By the
kernel's name and that digest it looks among the kernels it has loaded, then in its folder of
compiled ones, and only then at what the launch brought (`mlx/backend/cuda/jit_module.cpp`). So code
that lies in the folder, under the digest of nothing, is launched with nothing.

Invariants:
- Only a folder of this user's is used that nobody else may write, or put another one in the place
  of: what lies there is run.
- That MLX finds what is put there is shown once, by a kernel that is launched so. Otherwise, and
  wherever a file cannot be written, launches bring their code along.
- A kernel's name has a digest of its source and of the whole toolchain, and what is there is used
  only if it is all there: code, digest of the code, and names.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx

from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.state_file import replace_bytes
from mlxd_worker.kernels.device import Kernel
from mlxd_worker.kernels.nvrtc import CompileError, Compiler, find_compiler

FOLDER_VARIABLE: Final = "MLX_PTX_CACHE_DIR"
"""Names MLX's folder; otherwise that lies among temporary files."""

NOTHING_DIGEST: Final = 0x553E93901E462A6E
"""What `std::hash<std::string>` of libstdc++ makes of an empty text, on 64 bits."""

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_MODE: Final = 0o755
_PROBE_SYMBOL: Final = "mlxd_probe"
_PROBE_ANSWER: Final = 42
_PROBE: Final = (
    f'extern "C" __global__ void {_PROBE_SYMBOL}(int* out) {{ out[0] = {_PROBE_ANSWER}; }}\n'
)

_log = get_logger("kernels")


class CodeFiles:
    """A folder in which MLX looks for compiled kernels."""

    def __init__(self, folder: Path, *, toolchain: str) -> None:
        """Keep what one `toolchain` compiles in `folder`, which exists."""
        self._folder = folder
        self._toolchain = toolchain

    def find(self, symbol: str, source: str) -> str | None:
        """Return what to launch a kernel as that was put here; None: it was not, or not whole."""
        name = self._name(symbol, source)
        names, code, digest = self._paths(name)
        try:
            whole = digest.read_bytes() == _digest(code.read_bytes())
            return name if whole and names.read_bytes() == _line(name, symbol) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("a kernel is compiled anew", kernel=symbol, problem=str(error))
            return None

    def put(self, symbol: str, source: str, code: bytes) -> str | None:
        """Put there what a source compiles to; return what to launch it as, None where that failed.

        symbol: the kernel's name in the source.
        """
        name = self._name(symbol, source)
        names, code_file, digest = self._paths(name)
        try:
            # MLX reads which name is which symbol once it has seen that there is code.
            replace_bytes(names, _line(name, symbol))
            replace_bytes(digest, _digest(code))
            replace_bytes(code_file, code)
        except OSError as error:
            _log.warning("kernels are launched with their code", problem=str(error))
            return None
        return name

    def _name(self, symbol: str, source: str) -> str:
        """Return a kernel's own name: the same text is other code for another device."""
        text = f"{self._toolchain}\n{source}"
        return f"{symbol}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _paths(self, name: str) -> tuple[Path, Path, Path]:
        """Return the files of names, code, and the code's digest."""
        stem = f"{name}_{NOTHING_DIGEST:x}"
        names, code, digest = (self._folder / f"{stem}{end}" for end in (".txt", ".ptx", ".sha256"))
        return names, code, digest


def _line(name: str, symbol: str) -> bytes:
    return f"{name}\t{symbol}\n".encode()


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).hexdigest().encode()


@cache
def find_files() -> CodeFiles | None:
    """Return where code is put; None where launches bring theirs along. Engine thread."""
    compiler = find_compiler()
    folder = None if compiler is None else own_folder(os.environ, mlx_version=version("mlx"))
    if compiler is None or folder is None:
        return None
    files = CodeFiles(folder, toolchain=compiler.toolchain)
    return files if prove(files, compiler) else None


def own_folder(environ: Mapping[str, str], *, mlx_version: str) -> Path | None:
    """Return MLX's folder, made if need be; None where others may decide what is run from it."""
    named = environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(tempfile.gettempdir()) / "mlx" / mlx_version / "ptx"
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.exists():
                path.mkdir(mode=_MODE, exist_ok=True)
        user = os.geteuid()
        own = is_own(folder.stat(), user=user)
        stays = all(
            keeps_entries(parent.stat(), user=user)
            for path in (folder, folder.resolve())
            for parent in path.absolute().parents
        )
    except OSError as error:
        _log.warning("kernels are launched with their code", problem=str(error))
        return None
    if own and stays:
        return folder
    problem = "others may write there, or above"
    _log.warning("kernels are launched with their code", problem=problem, folder=str(folder))
    return None


def is_own(described: os.stat_result, *, user: int) -> bool:
    """Tell whether a folder is a user's, and nobody else may write there. Pure."""
    return described.st_uid == user and not described.st_mode & _OTHERS_WRITE


def keeps_entries(described: os.stat_result, *, user: int) -> bool:
    """Tell whether nobody else may take a user's own entries out of a folder. Pure."""
    sticky = described.st_mode & stat.S_ISVTX
    shared = described.st_mode & _OTHERS_WRITE and not sticky
    return described.st_uid in {user, 0} and not shared


def prove(
    files: CodeFiles, compiler: Compiler, launch: Kernel = mx.fast.precompiled_cuda_kernel
) -> bool:
    """Launch a kernel without its code; return whether it did what it says. Engine thread."""
    try:
        name = files.put(_PROBE_SYMBOL, _PROBE, compiler.compile(_PROBE, name=_PROBE_SYMBOL))
        if name is None:
            return False
        (out,) = launch(
            name=name,
            compiled_source=b"",
            inputs=[],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            scalars=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return bool(out.item() == _PROBE_ANSWER)
    except (CompileError, RuntimeError) as error:
        _log.warning("kernels are launched with their code", problem=str(error))
        return False
