"""llama.cpp's HTTP server from the wheel `xllamacpp`: `FILE PORT CONTEXT SLOTS THREADS`.

A line with its address goes to standard output once it listens; it serves until it is killed.
"""

from __future__ import annotations

import importlib
import signal
import sys


def main() -> None:
    """Become the server."""
    path, port, context, slots, threads = sys.argv[1:]
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = int(slots)
    params.n_ctx = int(context) * int(slots)
    params.kv_unified = False
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_threads_http = int(slots) + 8
    params.warmup = True
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
