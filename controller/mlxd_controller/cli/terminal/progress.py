"""The progress of a load or a pull on stderr: a bar of bytes on a terminal, else a line a stage."""

from __future__ import annotations

import asyncio
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mlxd.messages import Model
from mlxd_controller.cli.outcome import complain
from mlxd_shared.domain.pulls import PullPhase, PullProgress
from mlxd_shared.ops.terminal import escape

_STAGES = {PullPhase.WAITING: "waiting for another pull", PullPhase.LISTING: "looking"}


class ByteBar:
    """Shows each update while its block lasts; `quiet` shows nothing."""

    def __init__(self, waiting_for: str, *, quiet: bool = False) -> None:
        """Show `waiting_for` until the first update."""
        console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._lines = not quiet and not console.is_terminal
        self._task = self._progress.add_task(waiting_for, total=None)
        self._stage = ""
        self._loading = ""

    def update(self, name: str, stage: str, here_nbytes: int, total_nbytes: int) -> None:
        """Show how far a model is; a total of 0 is one that is not known yet."""
        line = escape(f"{name}: {stage}")
        if self._lines and stage != self._stage:
            typer.echo(line, err=True)
        self._stage = stage
        self._progress.update(
            self._task,
            description=line,
            completed=here_nbytes,
            total=total_nbytes or None,
        )

    def show_pull(self, name: str, step: PullProgress) -> None:
        """Show how far the download of a model is."""
        stage = step.file or _STAGES.get(step.phase, step.phase.value)
        self.update(name, stage, step.done_nbytes, step.total_nbytes)

    def show_load(self, model: Model) -> None:
        """Show how far the load of a model is."""
        self._loading = model.name
        progress = model.progress
        self.update(
            model.name,
            progress.stage or model.state.value,
            progress.bytes_read,
            progress.bytes_total,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        if self._loading and kind is not None and issubclass(kind, asyncio.CancelledError):
            # A load belongs to the server: who asked for it may go.
            name = self._loading
            complain(f"the server goes on loading {name}; `mlxd unload {name}` ends that")
