"""What workers and folders say of what is on disk: who has a disk, whose a folder is. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlxd_controller.runtime.worker import Worker
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.root import FormFolder
from mlxd_shared.domain.figures import PrefixDisk


def with_disk(workers: Iterable[Worker], *, stopping: bool = False) -> dict[Worker, PrefixDisk]:
    """Return the workers that are ready, or being stopped, and what they keep on disk."""
    return {
        worker: figures.prefix_disk
        for worker in workers
        if worker.ready_s is not None
        and worker.stopping == stopping
        and worker.link is not None
        and (figures := worker.figures) is not None
        and figures.prefix_disk is not None
    }


def names_of(folder: FormFolder) -> set[str]:
    """Return what the model of a folder is called."""
    return {folder.about.model, folder.about.digest} - {""}


def as_folder(worker: Worker, figures: PrefixDisk) -> FormFolder:
    """Return a worker's folder, by its own word."""
    own = worker.figures
    assert own is not None, "it has spoken"
    about = About(
        model=worker.name,
        digest=worker.digest,
        weights=own.weights.value,
        context_length=own.context_length,
        device=own.device,
        library=f"mlx {own.mlx_version}",
    )
    return FormFolder(
        figures.form,
        about,
        blocks=figures.blocks,
        nbytes=figures.nbytes,
        least_worth=figures.least_worth,
        is_held=True,
        is_encrypted=figures.encrypted,
    )


def in_the_clear(folders: Iterable[FormFolder]) -> list[FormFolder]:
    """Return the folders of nobody's in which not everything is encrypted."""
    return [folder for folder in folders if folder.in_clear and not folder.is_held]


def list_locked(folders: Iterable[FormFolder], key_name: str) -> list[FormFolder]:
    """Return the folders of nobody's that no worker can read here.

    key_name: of the key that there is; empty: there is none.
    """
    return [
        folder
        for folder in folders
        if folder.is_encrypted and not folder.is_held and folder.about.key != key_name
    ]
