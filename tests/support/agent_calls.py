"""Times calls to a node's agent, as a process of its own.

    python -m tests.support.agent_calls ADDRESS NODE

Prints the milliseconds of each call as one JSON list. They are calls of no controller: the agent
refuses them, and does not take them for its own one's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray

NAMESPACE = "mlxd"
CALLS = 200
MILLI = 1000


def main(address: str, name: str) -> None:
    """Make the calls one after another."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    list_nodes: Any = ray.nodes  # has no types
    living = (node for node in list_nodes() if node["Alive"])
    node = next(node for node in living if node["Labels"].get("mlxd.name") == name)
    agent: Any = ray.get_actor(f"agent-{node['NodeID']}", namespace=NAMESPACE)
    took_ms = []
    for _ in range(CALLS):
        begin_s = time.monotonic()
        ray.get(agent.call.remote("report", 0, {}))
        took_ms.append(MILLI * (time.monotonic() - begin_s))
    ray.shutdown()
    sys.stdout.write(json.dumps(took_ms))


if __name__ == "__main__":
    main(*sys.argv[1:])
