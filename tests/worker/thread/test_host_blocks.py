"""A resident model whose prompts outlive it: through unloads, other hosts, and bad folders."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.chain import BLOCK_TOKENS
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import ModelUnloaded
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.thread.blocks import open_blocks
from mlxd_worker.thread.facts import DiskFolder, LoadJob
from mlxd_worker.thread.host import ModelHost
from tests.support.engines import GREEDY, Collected, tiny_engine
from tests.support.kept_on_disk import SLOW
from tests.support.random_model import write_dense_model
from tests.support.remembering import tokens_of

PROMPT = tokens_of(1, 400)
DIGEST = "d" * 64
_streams = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a block is worth keeping."""
    return write_dense_model(tmp_path_factory.mktemp("slow"), shape=SLOW)


@contextmanager
def hosting(folder: DiskFolder | None) -> Iterator[ModelHost]:
    """Give a host on this thread; MLX's own limits are put back."""
    limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(limit)
    host = ModelHost(
        device=choose_backend(installed_versions(), platform=sys.platform).kind, folder=folder
    )
    yield host
    host.unload(ModelUnloaded("tiny"))
    mx.set_cache_limit(limit)


def load(host: ModelHost, model: Path, *, digest: str = DIGEST, context: int = 512) -> None:
    """Load the model for two rows."""
    spec = LoadSpec(rows_max=2, context_length=context)
    host.load(LoadJob(model, "tiny", digest, spec), lambda _: None)


def ask(host: ModelHost, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
    """Return an answer, and how many of the prompt's tokens were not evaluated."""
    sink = Collected()
    host.submit(
        Submit(
            stream=StreamId(next(_streams)),
            prompt=prompt,
            sampling=GREEDY,
            max_tokens=8,
            stop=(),
            stop_token_ids=frozenset(),
            eos_ids=frozenset(),
            skip_special_tokens=True,
            submitted_s=0.0,
            sink=sink,
        )
    )
    while host.busy:
        host.step()
    return sink.ids, sink.reused


def block_threads() -> set[str]:
    """Return the names of threads that write and read blocks."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("prefix-")}


def test_a_prompt_outlives_its_model(model: Path, tmp_path: Path) -> None:
    """Unloaded and loaded again, in this process and in another one: the same tokens, fewer
    evaluated; and with the model its threads go.
    """
    folder = DiskFolder(tmp_path / "blocks", 1 << 30)
    with hosting(folder) as host:
        load(host, model)
        cold, cached = ask(host)
        assert cached == 0
        assert block_threads() == {"prefix-reader", "prefix-writer"}
        host.unload(ModelUnloaded("tiny"))
        assert block_threads() == set()

        load(host, model)
        assert ask(host) == (cold, BLOCK_TOKENS)
    with hosting(folder) as host:
        load(host, model)
        assert ask(host) == (cold, BLOCK_TOKENS)


def test_a_host_that_closes_writes_first(model: Path, tmp_path: Path) -> None:
    """A process that ends in good order keeps what its model had in memory alone."""
    folder = DiskFolder(tmp_path / "blocks", 1 << 30)
    with hosting(folder) as host:
        load(host, model)
        ask(host)
        host.close()
        assert list(folder.path.glob("v*/*.safetensors"))


def test_what_a_load_fixes_tells_forms_apart(model: Path, tmp_path: Path) -> None:
    """Another version of the weights, or another context, finds nothing of the first."""
    folder = DiskFolder(tmp_path / "blocks", 1 << 30)
    with hosting(folder) as host:
        load(host, model)
        ask(host)
        for other in ({"digest": "e" * 64}, {"context": 448}):
            host.unload(ModelUnloaded("tiny"))
            load(host, model, **other)
            assert ask(host)[1] == 0
    assert len(list(folder.path.iterdir())) == 3


def test_another_mlx_finds_nothing(model: Path, tmp_path: Path) -> None:
    """An update of the library may round in another way: it has a folder of its own."""
    caches = tiny_engine(model).caches
    for library in ("mlx 1", "mlx 2", "mlx 1"):
        disk = open_blocks(
            DiskFolder(tmp_path / "blocks", 1 << 30),
            caches,
            digest=DIGEST,
            weights="F32",
            context_length=512,
            device=DeviceKind.CPU,
            library=library,
        )
        assert disk is not None
        disk.tier.close(timeout_s=60.0)
    assert len(list((tmp_path / "blocks").iterdir())) == 2


def test_without_a_folder_nothing_is_kept(model: Path) -> None:
    """No folder, no threads."""
    with hosting(None) as host:
        load(host, model)
        ask(host)
        assert block_threads() == set()


def test_a_folder_that_others_see_is_done_without(model: Path, tmp_path: Path) -> None:
    """One line says why, nothing is written there, and the model serves."""
    (tmp_path / "blocks").mkdir(mode=0o755)
    (tmp_path / "blocks").chmod(0o755)
    with hosting(DiskFolder(tmp_path / "blocks", 1 << 30)) as host, capture_logs() as logs:
        load(host, model)
        first, _ = ask(host)
        assert ask(host) == (first, len(PROMPT) - 1)
        (line,) = [log for log in logs if log["event"] == "prefixes are not kept on disk"]
        assert "0700" in line["reason"]
    assert list((tmp_path / "blocks").iterdir()) == []


def test_a_folder_that_another_has_is_done_without(model: Path, tmp_path: Path) -> None:
    """Two workers of one model and one folder: the second serves without."""
    folder = DiskFolder(tmp_path / "blocks", 1 << 30)
    with hosting(folder) as host:
        load(host, model)
        with capture_logs() as logs, hosting(folder) as second:
            load(second, model)
            assert ask(second)[1] == 0
        assert "prefixes are not kept on disk" in [log["event"] for log in logs]
        assert ask(host)[1] == 0
