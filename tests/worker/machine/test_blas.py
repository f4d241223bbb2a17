"""The BLAS under MLX: which one, that MLX's calls reach it, and what else where it cannot be."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxd_shared import config
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.machine.blas import CHOICE_VARIABLE, THREADS_MAX, THREADS_VARIABLE, preload_blas
from mlxd_worker.machine.blas_bundle import (
    KEPT_FILES_MAX,
    SYMBOL_PREFIX,
    cache_folders,
    find_wheel,
    is_whole,
    read_dynamic_symbols,
)
from mlxd_worker.machine.blas_library import BlasError
from mlxd_worker.machine.products import LIBRARY, NATIVE
from tests.worker.fresh_process import environment, result, run, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings Accelerate")

REPORT = """
import dataclasses, json
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.blas import preload_blas
try:
    answer = dataclasses.asdict(preload_blas())
except BackendProblem as error:
    answer = {"problem": str(error)}
print(json.dumps(answer))
"""
ORIGINS = """
import json
from mlxd_worker.machine.blas import preload_blas
from mlxd_worker.machine.blas_library import symbol_origin
report = preload_blas()
names = NAMES
print(json.dumps({"path": report.path, "origins": {n: symbol_origin(n) for n in names}}))
"""
ALGEBRA = """
import json
from mlxd_worker.machine.blas import preload_blas
report = preload_blas()
import mlx.core as mx
with mx.stream(mx.cpu):
    left = mx.arange(300 * 200).reshape(300, 200).astype(mx.float32) % 7
    right = mx.arange(200 * 100).reshape(200, 100).astype(mx.float32) % 5
    exact = mx.sum(left[:, :, None] * right[None], axis=1)
    square = mx.random.normal((40, 40), key=mx.random.key(0))
    even = square @ square.T + 40 * mx.eye(40)
    q, r = mx.linalg.qr(square)
    u, s, vt = mx.linalg.svd(square)
    values, vectors = mx.linalg.eigh(even)
    factor = mx.linalg.cholesky(even)
    errors = {
        "matmul": mx.max(mx.abs(left @ right - exact)),
        "inv": mx.max(mx.abs(mx.linalg.inv(even) @ even - mx.eye(40))),
        "qr": mx.max(mx.abs(q @ r - square)),
        "svd": mx.max(mx.abs((u * s) @ vt - square)),
        "eigh": mx.max(mx.abs((vectors * values) @ vectors.T - even)),
        "cholesky": mx.max(mx.abs(factor @ factor.T - even)),
    }
    print(json.dumps({name: error.item() for name, error in errors.items()}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a cache folder that the tests of this file share, so the library is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bundled(cache: Path) -> dict[str, Any]:
    """Give the report of a process that made the library, or found it made."""
    report: dict[str, Any] = run(REPORT, environment(XDG_CACHE_HOME=cache))
    assert report["name"] == "openblas", report
    return report


def libraries(cache: Path) -> list[Path]:
    """Return all files below a cache folder."""
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of another processor")
def test_the_report_names_the_kernels_in_use(cache: Path) -> None:
    """As OpenBLAS says, not as it was asked: a name that it does not know changes nothing."""
    reports = {
        name: run(REPORT, environment(XDG_CACHE_HOME=cache, OPENBLAS_CORETYPE=name))["reason"]
        for name in ("Nehalem", "Sandybridge", "nonsense")
    }
    assert reports["Nehalem"].endswith("; Nehalem kernels")
    assert reports["Sandybridge"].endswith("; Sandybridge kernels")
    assert reports["nonsense"].endswith(" kernels")
    assert "nonsense" not in reports["nonsense"]


def test_the_bundled_library_is_made_once_and_kept(cache: Path, bundled: dict[str, Any]) -> None:
    """The first worker makes the library in the cache folder; the next one opens the same file."""
    path = Path(bundled["path"])
    assert libraries(cache) == [path]
    status = path.stat()
    again = run(REPORT, environment(XDG_CACHE_HOME=cache))
    assert again == bundled
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert bundled["version"].startswith("0.3.")


def test_every_blas_call_of_mlx_reaches_the_library(cache: Path, bundled: dict[str, Any]) -> None:
    """By the linker's word, each BLAS and LAPACK function MLX wants resolves to our library."""
    backend = choose_backend(installed_versions(), platform=sys.platform).distribution
    files = importlib.metadata.distribution(backend).files or ()
    mlx = next(Path(str(file.locate())) for file in files if file.name == "libmlx.so")
    wanted = {name for name, gives in read_dynamic_symbols(mlx).items() if not gives}
    bundle = [name for name, gives in read_dynamic_symbols(find_wheel().path).items() if gives]
    names = sorted(wanted & {name.removeprefix(SYMBOL_PREFIX) for name in bundle})
    assert {"cblas_sgemm", "cblas_dgemm", "sgesdd_", "dgetrf_"} <= set(names)
    code = ORIGINS.replace("NAMES", repr(names))
    alone = run(code, environment(XDG_CACHE_HOME=cache, MLXD_PRODUCTS="off"))
    assert alone["origins"] == dict.fromkeys(names, bundled["path"])
    in_front = run(code, environment(XDG_CACHE_HOME=cache))
    ours = {"cblas_sgemm": str(NATIVE / LIBRARY)}
    assert in_front["origins"] == dict.fromkeys(names, bundled["path"]) | ours


@pytest.mark.usefixtures("bundled")
def test_mlx_computes_rightly_on_it(cache: Path) -> None:
    """Products are exact on small integers, and factorisations multiply back to their input."""
    errors = run(ALGEBRA, environment(XDG_CACHE_HOME=cache))
    assert errors.pop("matmul") == 0.0
    assert max(errors.values()) < 1e-3


def test_workers_that_start_together_share_one_file(tmp_path: Path) -> None:
    """Any number of workers may find the cache empty at once; all succeed, one file stays."""
    started = [start(REPORT, environment(XDG_CACHE_HOME=tmp_path)) for _ in range(3)]
    reports = [result(process) for process in started]
    assert len({report["path"] for report in reports}) == 1
    assert [str(path) for path in libraries(tmp_path)] == [reports[0]["path"]]


@pytest.mark.usefixtures("bundled")
def test_a_damaged_file_is_made_again(cache: Path, tmp_path: Path) -> None:
    """A cut library would kill the process when mapped; it is noticed and replaced."""
    kept = libraries(cache)[0]
    damaged = tmp_path / kept.relative_to(cache)
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(kept.read_bytes()[:1_000_000])
    report = run(REPORT, environment(XDG_CACHE_HOME=tmp_path))
    assert report["path"] == str(damaged)
    assert damaged.read_bytes() == kept.read_bytes()


def test_without_a_usable_cache_folder_it_lies_in_the_temporary_one(tmp_path: Path) -> None:
    """Where the cache folder cannot be made, or others can write to it, the reason says so."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    shared = tmp_path / "shared"
    (shared / "mlxd" / "blas").mkdir(parents=True)
    (shared / "mlxd" / "blas").chmod(0o777)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for folder, word in [(blocked, "Not a directory"), (shared, "written by others")]:
        report = run(REPORT, environment(XDG_CACHE_HOME=folder, TMPDIR=scratch))
        assert report["path"].startswith(f"{scratch}/mlxd-{os.geteuid()}/")
        assert word in report["reason"]


def test_without_any_folder_mlx_keeps_its_own(tmp_path: Path) -> None:
    """With auto, a worker that can put no library anywhere still starts, and says what it lacks."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    (tmp_path / f"mlxd-{os.geteuid()}").write_text("a file", encoding="utf-8")
    (tmp_path / "libopenblas.so.0").write_text("no library", encoding="utf-8")
    places = environment(XDG_CACHE_HOME=blocked, TMPDIR=tmp_path, LD_LIBRARY_PATH=tmp_path)
    report = run(REPORT, places)
    assert (report["name"], report["threads"]) == ("reference", 1)
    assert "bundled: not in" in report["reason"]
    assert "system: " in report["reason"]
    forced = run(REPORT, places | {CHOICE_VARIABLE: "bundled"})
    assert "MLXD_BLAS=bundled does not work here" in forced["problem"]


def test_the_systems_library_can_be_chosen(bundled: dict[str, Any], tmp_path: Path) -> None:
    """MLXD_BLAS=system opens libopenblas.so.0 by the linker's search, or is an error."""
    library = tmp_path / "libopenblas.so.0"
    library.write_text("no library", encoding="utf-8")
    system = environment(LD_LIBRARY_PATH=tmp_path, **{CHOICE_VARIABLE: "system"})
    assert "MLXD_BLAS=system does not work here" in run(REPORT, system)["problem"]
    library.unlink()
    library.symlink_to(bundled["path"])
    report = run(REPORT, system)
    assert (report["name"], report["path"]) == ("openblas", bundled["path"])


def test_what_somebody_preloaded_is_left_alone(cache: Path, bundled: dict[str, Any]) -> None:
    """A BLAS that is there already is used and reported; asking for another is an error."""
    preloaded = environment(XDG_CACHE_HOME=cache, LD_PRELOAD=bundled["path"])
    report = run(REPORT, preloaded)
    assert (report["name"], report["path"]) == ("preloaded", bundled["path"])
    assert "products by it alone" in report["reason"]
    forced = run(REPORT, preloaded | {CHOICE_VARIABLE: "bundled"})
    assert "cblas_sgemm already" in forced["problem"]


def test_mlx_can_keep_its_own() -> None:
    """MLXD_BLAS=none loads nothing and says so."""
    report = run(REPORT, environment(**{CHOICE_VARIABLE: "none"}))
    assert (report["name"], report["path"]) == ("reference", "")
    assert report["reason"] == "MLXD_BLAS=none"


def test_mlx_imported_earlier_is_an_error() -> None:
    """Symbols are bound when MLX is loaded; to come later would silently change nothing."""
    report = run("import mlx.core\n" + REPORT, environment())
    assert "imported before" in report["problem"]


@pytest.mark.parametrize("word", ["fast", "NONE", " auto"])
def test_a_malformed_choice_is_an_error(word: str) -> None:
    """A value of MLXD_BLAS that means nothing is refused with those that do."""
    report = run(REPORT, environment(**{CHOICE_VARIABLE: word}))
    assert "auto, bundled, system, none" in report["problem"]


@pytest.mark.parametrize("word", ["0", "-1", "two", "²", str(THREADS_MAX + 1)])
def test_a_malformed_thread_count_is_an_error(word: str) -> None:
    """A thread count outside its bounds is refused with the bounds."""
    report = run(REPORT, environment(**{THREADS_VARIABLE: word}))
    assert f"within 1 and {THREADS_MAX}" in report["problem"]


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({THREADS_VARIABLE: "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "3"}, 3),
        ({THREADS_VARIABLE: "2", "OPENBLAS_NUM_THREADS": "3"}, 2),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_threads_are_as_asked(cache: Path, variables: dict[str, str], threads: int) -> None:
    """The thread count reported is the library's own answer, and it is what was asked for."""
    assert run(REPORT, environment(XDG_CACHE_HOME=cache, **variables))["threads"] == threads


@pytest.mark.parametrize(("spin", "used"), [("", config.BLAS_SPIN_CYCLES_LOG2), ("24", "24")])
@pytest.mark.usefixtures("bundled")
def test_idle_threads_sleep_soon_unless_told_otherwise(cache: Path, spin: str, used: str) -> None:
    """How long idle threads spin is said before the library is loaded; a user's word wins."""
    variables = environment(XDG_CACHE_HOME=cache)
    variables.pop(config.BLAS_SPIN_VARIABLE, None)
    if spin:
        variables[config.BLAS_SPIN_VARIABLE] = spin
    ask = f"import os\nprint(json.dumps(os.environ[{config.BLAS_SPIN_VARIABLE!r}]))\n"

    assert run(REPORT + ask, variables) == used


def test_later_calls_return_the_first_report() -> None:
    """The tests' own process was prepared at its start; asking again changes nothing."""
    report = preload_blas({CHOICE_VARIABLE: "nonsense"})
    assert report is preload_blas()


def test_old_libraries_are_removed(cache: Path, bundled: dict[str, Any], tmp_path: Path) -> None:
    """Of the libraries of other wheel versions only the newest few stay."""
    folder = tmp_path / "mlxd" / "blas"
    folder.mkdir(parents=True, mode=0o700)
    for age in range(6):
        old = folder / f"libmlxd-openblas-{age}.so"
        old.write_bytes(b"old")
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    report = run(REPORT, environment(XDG_CACHE_HOME=tmp_path))
    newest = {f"libmlxd-openblas-{age}.so" for age in range(KEPT_FILES_MAX - 1)}
    assert {path.name for path in libraries(tmp_path)} == newest | {Path(report["path"]).name}
    assert cache.exists()


def test_cache_folders_follow_the_users_environment(tmp_path: Path) -> None:
    """XDG_CACHE_HOME, if absolute, else the home folder, then the temporary folder of this user."""
    named = [str(f) for f in cache_folders({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/h"})]
    assert named[0] == f"{tmp_path}/mlxd/blas"
    homes = [str(f) for f in cache_folders({"XDG_CACHE_HOME": "relative", "HOME": "/h"})]
    assert homes[0] == "/h/.cache/mlxd/blas"
    assert named[1] == homes[1]
    assert len(list(cache_folders({}))) == 1


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    """Reading symbols of something else, or of half a library, is an error and never a guess."""
    path = tmp_path / "library.so"
    whole = find_wheel().path.read_bytes()
    for content in [b"", b"\x7fELF", b"x" * 4096, whole[:5000], whole[:64]]:
        path.write_bytes(content)
        assert not is_whole(path)
        with pytest.raises(BlasError):
            read_dynamic_symbols(path)
    assert is_whole(find_wheel().path)


def test_a_preloaded_library_gets_the_threads_asked_for(bundled: dict[str, Any]) -> None:
    """It has counted the machine's cores by itself; and spins unless it was told before."""
    quiet = {config.BLAS_SPIN_VARIABLE: config.BLAS_SPIN_CYCLES_LOG2}
    base = environment(LD_PRELOAD=bundled["path"], **{THREADS_VARIABLE: "1"})
    base.pop(config.BLAS_SPIN_VARIABLE, None)
    loud = run(REPORT, base)
    assert (loud["threads"], loud["version"]) == (1, bundled["version"])
    assert "idle threads keep their cores busy" in loud["reason"]
    assert "idle threads" not in run(REPORT, base | quiet)["reason"]
