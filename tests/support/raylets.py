"""A Ray cluster on this machine as a process: `python raylets.py NAME...` starts a head and nodes.

On stdout, one JSON value a line: first the head's address, then an answer to each line on stdin:
`kill NAME` ends a node's raylet and reaps it, `stop NAME` and `continue NAME` suspend and wake all
of its processes, `join NAME` adds a node, `memory NAME` tells what its processes hold. At the end
of stdin, and at SIGTERM, everything is ended.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psutil
from ray.cluster_utils import Cluster

STORE_NBYTES = 80 << 20
WORKER = "mlxd_worker"
MEGA = 1_000_000


def main(names: list[str]) -> None:
    """Run a cluster until stdin ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cluster: Any
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_NBYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}
    try:
        nodes |= {name: _join(cluster, name) for name in names}
        _answer(cluster.address)
        for line in sys.stdin:
            what, name = line.split()
            answer: object = what
            match what:
                case "join":
                    nodes[name] = _join(cluster, name)
                case "kill":
                    raylet = _raylet(nodes[name])
                    raylet.kill()
                    raylet.wait()  # a zombie would keep its agent and workers going
                case "stop" | "continue":
                    _suspend(nodes[name], on=what == "stop")
                case "memory":
                    answer = _memory(nodes[name])
            _answer(answer)
    finally:
        for node in nodes.values():
            _suspend(node, on=False)
        cluster.shutdown()


def _join(cluster: Any, name: str) -> Any:
    return cluster.add_node(
        num_cpus=0,
        resources={"mlxd": 1},
        labels={"mlxd.name": name},
        object_store_memory=STORE_NBYTES,
    )


def _raylet(node: Any) -> Any:
    return node.all_processes["raylet"][0].process


def _suspend(node: Any, *, on: bool) -> None:
    """Suspend all processes of a node, or wake them; whoever has gone meanwhile is passed over."""
    for process in _tree(_raylet(node).pid):
        try:
            if on:
                process.suspend()
            else:
                process.resume()
        except psutil.NoSuchProcess:
            continue


def _memory(node: Any) -> dict[str, float]:
    """Return the megabytes that a node's processes hold alone: workers of models, and others."""
    held = {"workers": 0.0, "others": 0.0}
    for process in _tree(_raylet(node).pid):
        try:
            kind = "workers" if WORKER in process.cmdline() else "others"
            held[kind] += process.memory_full_info().uss / MEGA
        except psutil.Error:
            continue
    return held


def _tree(pid: int) -> Iterator[psutil.Process]:
    try:
        raylet = psutil.Process(pid)
        yield from (raylet, *raylet.children(recursive=True))
    except psutil.NoSuchProcess:
        return  # it was killed


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
