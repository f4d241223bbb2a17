"""What a sum over ranks takes on this host, and how fast a device reads weights.

`python -m tests.bench.ranks_machine RANKS HIDDEN RANK` is one rank of that, started by the others'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from mlxd_shared.domain.devices import DeviceKind
from mlxd_worker.distributed.group import join_group, make_group
from mlxd_worker.machine.backend import prepare_backend

ROWS = (1, 8)
"""Rows of a step that are timed."""
READ_BYTES = {DeviceKind.CPU: 64 << 20}
"""How many bytes of weights are read to time that; of GPUs READ_GPU_BYTES."""
READ_GPU_BYTES = 4 << 30


def tell(**values: object) -> None:
    """Print one line of results."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def time_machine(rank: int, ranks: int, hidden: int) -> None:
    """Tell what a sum takes in a chain of 64, by rows, and a read of weights, as one rank."""
    kind = prepare_backend().kind
    share = join_group(rank, ranks, kind)
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS

    for rows in (*ROWS, 32, 2048):
        ones = mx.ones((rows, hidden), mx.bfloat16)

        def chain(ones: mx.array = ones) -> mx.array:
            out = ones
            for _ in range(64):
                out = share.add(out) * 0.5
            return out

        mx.eval(chain(), chain())
        began_s = time.monotonic()
        for _ in range(5):
            mx.eval(chain())
        each_us = (time.monotonic() - began_s) / 5 / 64 * 1e6
        if rank == 0:
            tell(part="sum", ranks=ranks, rows=rows, hidden=hidden, us=round(each_us, 1))
    form = mx.float32 if kind is DeviceKind.CPU else mx.bfloat16
    each_nbytes = 4 * hidden * hidden * form.size
    count = max(READ_BYTES.get(kind, READ_GPU_BYTES) // each_nbytes, 2)
    weights = [mx.random.normal((4 * hidden, hidden), form) for _ in range(count)]
    row = mx.ones((1, hidden), form)
    mx.eval(weights, row)

    def read() -> list[mx.array]:
        return [row @ each.T for each in weights]

    mx.eval(read())
    began_s = time.monotonic()
    for _ in range(5):
        mx.eval(read())
    rate = 5 * count * each_nbytes / (time.monotonic() - began_s)
    if rank == 0:
        tell(part="read", gb_per_s=round(rate / 1e9, 1), bytes_per_s=int(rate))


def measure_machine(ranks: int, kind: DeviceKind, hidden: int) -> tuple[dict[int, float], float]:
    """Return the microseconds of a sum by rows, and the bytes of weights read in a second."""
    group = make_group(ranks, kind)
    command = [sys.executable, "-m", "tests.bench.ranks_machine", str(ranks), str(hidden)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**os.environ, **group.environment(rank)},
            pass_fds=group.descriptors,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    sums, rate = {}, 0.0
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank ended with {process.returncode}")
        for line in (json.loads(text) for text in out.splitlines() if text.startswith("{")):
            tell(**line)
            if line["part"] == "sum":
                sums[line["rows"]] = line["us"]
            else:
                rate = line["bytes_per_s"]
    return sums, rate


if __name__ == "__main__":
    ranks, hidden, rank = map(int, sys.argv[1:])
    time_machine(rank, ranks, hidden)
