"""The load generator with both kinds of client, a process of its own."""

from __future__ import annotations

from typing import Final

from mlxd_controller.bench import load
from tests.bench.clients import HttpClient

HTTP: Final = "http"
"""mlx-lm's server."""
LLAMA: Final = "llama"
"""llama.cpp's server, whose model ends a text by itself unless it is asked not to."""
KINDS: Final = {
    **load.OURS,
    HTTP: lambda job: HttpClient(job.target, job.model),
    LLAMA: lambda job: HttpClient(job.target, job.model, ignore_eos=True, cache_prompt=False),
}

if __name__ == "__main__":
    load.main(KINDS)
