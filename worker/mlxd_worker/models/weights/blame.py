"""What is to blame where MLX could not open or read a file: its error says that, and not why.

Invariants:
- What the system has against a file is learnt by doing the same again, without MLX.
- The machine's own trouble, such as want of open files or a disk that fails, is never said of the
  model. Where nothing is wrong any more, MLX's word stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mlxd_models.files.model_files import file_error, open_regular
from mlxd_models.files.weights import TensorFact
from mlxd_shared.domain.errors import InvalidModel, MlxdError
from mlxd_worker.models.weights.direct_reading import SCRATCH_NBYTES, read_into


def why_not_opened(file: Path, error: Exception) -> MlxdError:
    """Return why MLX could not open a file, or understand its header."""
    doing = "could not be opened: "
    try:
        os.close(open_regular(str(file), os.O_RDONLY))
    except OSError as trouble:
        return file_error(trouble, file.name, doing=doing)
    reason = str(error).replace(str(file), file.name)  # the path is not shown
    return InvalidModel(f"{doing}{reason}", file=file.name)


def why_not_read(facts: Iterable[TensorFact], error: Exception, field: str = "") -> MlxdError:
    """Return why MLX could not read one of these tensors.

    field: what an error of MLX's own is said of; empty: the first of them, and its file.
    """
    doing, first = "could not be read: ", None
    for fact in facts:
        first = first or fact
        try:
            _read_through(fact)
        except OSError as trouble:
            return file_error(trouble, fact.file.name, fact.name, doing=doing)
        except EOFError:
            first = fact
            break
    if field or first is None:
        return InvalidModel(f"{doing}{error}", field=field)
    return first.error(f"{doing}{error}")


def _read_through(fact: TensorFact) -> None:
    """Read a tensor, and forget it; raises OSError, or EOFError if its file ends before it does."""
    descriptor = open_regular(str(fact.file), os.O_RDONLY)
    try:
        scratch = memoryview(bytearray(min(SCRATCH_NBYTES, fact.nbytes)))
        for done in range(0, fact.nbytes, SCRATCH_NBYTES):
            read_into(scratch[: fact.nbytes - done], descriptor, fact.begin + done)
    finally:
        os.close(descriptor)
