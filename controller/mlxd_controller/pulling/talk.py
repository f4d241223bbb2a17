"""What a controller and the process of a download say to each other: an order, then lines of JSON.

Errors travel as they do on the wire, so that they are the same ones behind the pipe.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxd_controller.pulling.wanted import Wanted
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from mlxd_shared.wire.status import from_bytes, to_bytes


def write_order(wanted: Wanted) -> str:
    """Return what is wanted as one argument."""
    return json.dumps(asdict(wanted) | {"cache": str(wanted.cache)})


def read_order(text: str) -> Wanted:
    """Return what `write_order` was given."""
    fields: dict[str, Any] = json.loads(text)
    include = tuple(fields.pop("include"))
    return Wanted(cache=Path(fields.pop("cache")), include=include, **fields)


def write_step(step: PullProgress) -> bytes:
    """Return the line of a step that is not the last."""
    return _line("step", asdict(step) | {"phase": step.phase.value})


def write_pulled(pulled: PulledModel) -> bytes:
    """Return the last line of a download that succeeded."""
    return _line("pulled", asdict(pulled))


def write_error(error: MlxdError) -> bytes:
    """Return the last line of one that did not."""
    return _line("error", base64.b64encode(to_bytes(error)).decode())


def read_line(line: bytes) -> PullProgress | PulledModel | MlxdError:
    """Return what a line says."""
    ((kind, value),) = json.loads(line).items()
    match kind:
        case "step":
            return PullProgress(**value | {"phase": PullPhase(value["phase"])})
        case "pulled":
            return PulledModel(**value)
        case _:
            return from_bytes(base64.b64decode(value))


def _line(kind: str, value: object) -> bytes:
    return json.dumps({kind: value}).encode() + b"\n"
