"""The progress of a load on stderr: a bar of bytes on a terminal, a line a stage elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mlxd.messages import Model
from mlxd_controller.cli import show


class LoadBar:
    """Shows each update of one load while its block lasts; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        console = show.console(err=True)
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
        self._task = self._progress.add_task("waiting", total=None)
        self._stage = ""

    def update(self, model: Model) -> None:
        """Show `model`'s progress."""
        stage = model.progress.stage or model.state.value
        if self._lines and stage != self._stage:
            typer.echo(f"{model.name}: {stage}", err=True)
        self._stage = stage
        self._progress.update(
            self._task,
            description=f"{model.name}: {stage}",
            completed=model.progress.bytes_read,
            total=model.progress.bytes_total or None,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
