"""The child of the tests: that of the worker, with less memory and no priority to give away."""

from __future__ import annotations

import os

from mlxd_shared.config import MIB
from mlxd_worker.killable.process import serve
from mlxd_worker.tokenizing.process import Desk

MEMORY_NBYTES = 512 * MIB
LIMIT_S = 300.0

if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the worker's; a thread takes much of it
    serve(Desk().answer, limit_s=LIMIT_S, memory_nbytes_max=MEMORY_NBYTES)
