"""What the machine lacks, such as open files, is never said of a model, nor remembered of it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

import mlxd_shared
from mlxd_controller.runtime.ports import BrokenRef, ModelRef
from mlxd_controller.store.folder import Readings
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelf import entries
from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_files import file_error, read_file
from mlxd_models.files.safetensors_header import read_header
from mlxd_models.files.stored_files import open_folder
from mlxd_shared.domain.errors import InvalidModel, MachineShort
from mlxd_shared.wire.status import code_of, to_status
from tests.support.launching import fake_command, launcher_of
from tests.support.no_more_files import no_more_files

READERS: dict[str, Callable[[Path], object]] = {
    "a small file": lambda folder: read_file(folder / "config.json", bytes_max=1 << 20),
    "a header": lambda folder: read_header(folder / "model.safetensors"),
    "the folder": open_folder,
    "the identity": model_digest,
    "a store": entries,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_the_machine_lacks_is_not_said_of_the_model(read: Callable[[Path], object]) -> None:
    """Without open files left the error names them; with them again the model is as it was."""
    folder = Path(str(mlxd_shared.__file__)).parent / "demo_model"
    with no_more_files(), pytest.raises(MachineShort, match=r"lacks open files: .*Too many open"):
        read(folder)

    assert read(folder)


@pytest.mark.asyncio
async def test_a_model_is_not_remembered_as_broken_for_the_machine_s_sake() -> None:
    """A reading that the machine could not do leaves nothing behind: the next one is whole."""
    folder = Path(str(mlxd_shared.__file__)).parent / "demo_model"
    readings = Readings()
    await asyncio.to_thread(lambda: None)  # its thread is there before files run out
    with no_more_files(), pytest.raises(MachineShort):
        await readings.read_good(folder)

    assert readings.last(folder) is None
    assert (await readings.read_good(folder)).digest


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_read_now_is_listed_so_and_hides_no_other() -> None:
    """The listing says what the machine lacks; the next one has the model."""
    folder = Path(str(mlxd_shared.__file__)).parent / "demo_model"
    library = Library([("demo", folder)])
    await asyncio.to_thread(lambda: None)  # its thread is there before files run out
    with no_more_files():
        (broken,) = await library.list_models()
    (model,) = await library.list_models()

    assert isinstance(broken, BrokenRef)
    assert "cannot be read now: the machine lacks open files" in broken.error.describe()
    assert isinstance(model, ModelRef)


@pytest.mark.asyncio
async def test_a_worker_that_the_machine_cannot_start_is_not_its_models_fault() -> None:
    """Without open files left for its pipes; the launcher starts the next one."""
    async with launcher_of(fake_command("serve")) as launcher:
        with (
            no_more_files(),
            pytest.raises(MachineShort, match="lacks open files: the worker of m: Too many open"),
        ):
            await launcher.launch(model="m", incarnation="i-1")
        worker = await launcher.launch(model="m", incarnation="i-2")
        await worker.close()


def test_a_disk_that_fails_is_not_said_of_the_model() -> None:
    """A real EIO, of a file that opens and cannot be read there."""
    with pytest.raises(MachineShort, match="lacks a disk that works: mem: Input/output error"):
        read_file(Path("/proc/self/mem"), bytes_max=1 << 20)


@pytest.mark.parametrize(
    ("number", "resource_name"),
    [
        (errno.EMFILE, "open files"),
        (errno.ENFILE, "open files"),
        (errno.ENOMEM, "memory"),
        (errno.ENOSPC, "disk space"),
        (errno.EDQUOT, "disk space"),
        (errno.EIO, "a disk that works"),
        (errno.ESTALE, "a disk that works"),
    ],
)
def test_what_the_machine_lacks_is_named(number: int, resource_name: str) -> None:
    """A typed refusal with a time to come back, not a broken model."""
    error = file_error(OSError(number, os.strerror(number)), "a", doing="could not be read: ")

    assert isinstance(error, MachineShort)
    assert (error.resource, error.doing) == (resource_name, f"a: {os.strerror(number)}")
    assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = [detail.TypeName() for detail in to_status(error).details]
    assert "google.rpc.RetryInfo" in details


def test_what_is_wrong_with_a_file_is_said_of_the_model() -> None:
    """A file that may not be read, or has gone, is the model's trouble."""
    denied = file_error(OSError(errno.EACCES, "Permission denied"), "a", "b", doing="c: ")
    missing = file_error(FileNotFoundError(errno.ENOENT, "No such file"), "a")

    assert str(denied) == "a: b: c: Permission denied"
    assert str(missing) == "a: missing"
    assert isinstance(denied, InvalidModel)
