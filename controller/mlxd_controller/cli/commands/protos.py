"""`mlxd protos`: the .proto files of the wire, for clients in other languages.

They are package data of mlxd_shared: a link to the folder `proto` in a working tree, files in a
wheel. Both are read in the same way.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli.outcome import ExitCode, leave

PACKAGE = Path("mlxd", "v1")
"""The folder below an include path that `import "mlxd/v1/types.proto"` needs."""

Out = Annotated[
    Path,
    typer.Option(metavar="DIR", help="Where to write mlxd/v1/*.proto; created if missing."),
]


def protos(*, out: Out) -> None:
    """Write the .proto files and print their paths. Existing files are overwritten."""
    folder = out.expanduser() / PACKAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources():
            target = folder / source.name
            target.write_bytes(source.read_bytes())
            typer.echo(str(target))
    except BrokenPipeError:
        raise
    except OSError as error:
        leave(f"cannot write to {folder}: {error.strerror}", ExitCode.ERROR)


def sources() -> list[Traversable]:
    """Return the .proto files of this installation, sorted by name."""
    folder = resources.files("mlxd_shared") / "protos" / PACKAGE.as_posix()
    files = (file for file in folder.iterdir() if file.name.endswith(".proto"))
    return sorted(files, key=lambda file: file.name)
