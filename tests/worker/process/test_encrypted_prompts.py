"""Worker processes that encrypt prompts on disk: killed, started with another key, and refused."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from mlxd_shared.blocks.chain import BLOCK_TOKENS
from mlxd_worker.process.exit_code import ExitCode
from tests.shared.blocks.made_blocks import files_in
from tests.support.disk_keys import secret_of, write_key
from tests.support.kept_on_disk import SLOW
from tests.support.random_model import write_dense_model
from tests.support.worker_process import refused_worker, running_worker
from tests.worker.process.test_prefix_disk import PROMPT, ask


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a block is worth keeping."""
    return write_dense_model(tmp_path_factory.mktemp("slow"), shape=SLOW)


def in_folder(folder: Path, key: Path | None) -> tuple[str, ...]:
    """Return the options of a worker that keeps prompts in a folder, encrypted with a key."""
    encrypted = () if key is None else ("--prefix-disk-key", str(key))
    return ("--prefix-disk", str(folder), *encrypted)


@pytest.mark.asyncio
async def test_a_killed_worker_loses_nothing_that_was_encrypted(
    model: Path, tmp_path: Path
) -> None:
    """After kill -9 a worker with the key reads it and says the same. One with another key says
    the same too, and computes it. No token is in a file; no secret in a log or on a command line.
    """
    folder, key = tmp_path / "blocks", write_key(tmp_path / "key")
    async with running_worker(*in_folder(folder, key)) as worker:
        await worker.load(model)
        cold, _ = await ask(worker)
        while not files_in(folder):
            await ask(worker)
        assert (await worker.fresh_status()).prefix_disk.encrypted
        words = psutil.Process(worker.pid).cmdline()
        worker.process.kill()
        await worker.wait_ended()
        said = [worker.log, *words]
    tokens = b"".join(token.to_bytes(4, "little") for token in PROMPT[:BLOCK_TOKENS])
    for path in files_in(folder):
        raw = path.read_bytes()
        assert path.suffix == ".sealed"
        assert tokens.hex().encode()[:32] not in raw

    async with running_worker(*in_folder(folder, key)) as worker:
        await worker.load(model)
        assert await ask(worker) == (cold, BLOCK_TOKENS)
        said.append(worker.log)
    other = write_key(tmp_path / "other", seed=2)
    async with running_worker(*in_folder(folder, other)) as worker:
        await worker.load(model)
        assert await ask(worker) == (cold, 0)
        said.append(worker.log)
    for text in said:
        for secret in (secret_of(1), secret_of(2)):
            assert secret.hex() not in text
            assert repr(secret) not in text


@pytest.mark.asyncio
async def test_a_key_leaves_nothing_in_the_clear(model: Path, tmp_path: Path) -> None:
    """What the model has left unencrypted goes, with a line, once there is a key; without the key
    again nothing is found and the encrypted files stay.
    """
    folder, key = tmp_path / "blocks", write_key(tmp_path / "key")
    async with running_worker(*in_folder(folder, None)) as worker:
        await worker.load(model)
        cold, _ = await ask(worker)
        worker.process.terminate()
        assert await worker.wait_ended() == 0
    assert [path.suffix for path in files_in(folder)] == [".safetensors"]

    async with running_worker(*in_folder(folder, key)) as worker:
        await worker.load(model)
        assert files_in(folder) == []
        assert "removed blocks in the clear" in worker.log
        assert await ask(worker) == (cold, 0)
        worker.process.terminate()
        assert await worker.wait_ended() == 0
    assert [path.suffix for path in files_in(folder)] == [".sealed"]

    async with running_worker(*in_folder(folder, None)) as worker:
        await worker.load(model)
        assert await ask(worker) == (cold, 0)
        assert not (await worker.fresh_status()).prefix_disk.encrypted
        assert ".sealed" in {path.suffix for path in files_in(folder)}


@pytest.mark.asyncio
async def test_a_worker_without_its_key_does_not_start(tmp_path: Path) -> None:
    """Missing, short or open to others: it ends, says why by name, and makes no folder."""
    folder, loose = tmp_path / "blocks", write_key(tmp_path / "loose", mode=0o644)
    short = write_key(tmp_path / "short")
    short.write_text("abc\n")
    for path, problem in (
        (tmp_path / "none", "there is no such file"),
        (short, "a key is 32 random bytes"),
        (loose, "is open to others (mode 0644): chmod 600"),
    ):
        refused = await refused_worker(*in_folder(folder, path))
        assert refused.code == ExitCode.CANNOT_START
        assert refused.line["kind"] == "BadCredentials"
        assert f"{path}: {problem}" in str(refused.line["error"])
        assert secret_of(1).hex() not in refused.log
    assert not folder.exists()
