"""The load generator with both kinds of client, a process of its own."""

from __future__ import annotations

from typing import Final

from mlxd_controller.bench import load
from tests.bench.clients import HttpClient

HTTP: Final = "http"
"""mlx-lm's server."""
KINDS: Final = {**load.OURS, HTTP: lambda job: HttpClient(job.target, job.model)}

if __name__ == "__main__":
    load.main(KINDS)
