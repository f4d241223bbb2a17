"""The one file that knows Ray: an agent on each node that offers the resource, and calls to it.

Ray carries calls and tells which nodes there are. It is told nothing of models or memory: an agent
takes no CPU and no resource, and its node's own report is what the scheduler goes by.

Invariants:
- No error of Ray's leaves this file but as NodeLost.
- What blocks runs on a thread: the event loop serves streams meanwhile.
- A call is made once: what fails is a loss, which is decided here and in that moment. Ray's own
  patience with a peer that is gone is switched off.
- An agent, and so its workers, runs at the priority of its raylet.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, redirect_stdout
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mlxd_controller.fleet.agent import NodeAgent
from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.members import Member, Members
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.settings import FLEET_SCHEME
from mlxd_shared import config
from mlxd_shared.domain.devices import JOINT
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.logs import get_logger

RESOURCE = "mlxd"
"""Nodes with this resource are used: `ray start --resources '{"mlxd": 1}'`."""
NAME_LABEL = "mlxd.name"
"""The label with a node's name; without it, the beginning of Ray's id is the name."""
NAMESPACE = "mlxd"
NOT_LET_IN = "Failed to connect to Ray cluster"
"""What Ray says, after 20 s of trying, of a cluster that has refused its token."""
CALLS_AT_ONCE_MAX = 1000
"""Of an agent: each worker has one call that waits for its end."""
CALLER_SETTINGS = {
    # A failed call is held for so long, in case that the head knows more; it does 12 s later.
    "RAY_timeout_ms_task_wait_for_death_info": "0",
    # Held calls are looked at in this interval.
    "RAY_core_worker_internal_heartbeat_ms": "100",
}
"""Variables that Ray reads in the controller's process, unless they are set otherwise."""
AGENT_SETTINGS = {
    # Ray makes its processes, and what they start, 15 nicer than its raylet: every other program of
    # the machine would come before a worker.
    "RAY_worker_niceness": "0",
    # An agent, and so its workers, ends so soon after its raylet.
    "RAY_raylet_death_check_interval_milliseconds": "100",
}
"""Variables of an agent's process."""
_log = get_logger("fleet")


class RayNode:
    """Implements StartedAgent over an actor."""

    def __init__(self, actor: Any) -> None:  # noqa: ANN401 - Ray's handles have no useful type
        self._actor = actor
        self.ended = False
        """Whether the actor has ended for good; one that restarts has not."""

    async def call(self, method: str, epoch: int, *args: object) -> Any:  # noqa: ANN401 - see port
        """Return what the agent answers; see the port."""
        try:
            return await self._actor.call.remote(method, epoch, *args)
        except RayError as error:
            self.ended = self.ended or isinstance(error, ActorDiedError)
            raise NodeLost(_first_line(error)) from error

    async def release(self) -> None:
        """End the actor."""
        self.ended = True
        try:
            await asyncio.to_thread(ray.kill, self._actor)
        except (RayError, ValueError) as error:
            raise NodeLost(_first_line(error)) from error


@asynccontextmanager
async def join_cluster(address: str) -> AsyncIterator[Members]:
    """Join a cluster around the body: `auto` is this machine's, else its head's HOST:PORT.

    Meanwhile what is printed goes to stderr: Ray prints there what happens to nodes, and stdout is
    for where this server listens.

    Raises:
        InvalidRequest: there is no such cluster, or it is of another version.
    """
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **CALLER_SETTINGS}.items():
        os.environ.setdefault(name, value)
    if address.startswith(FLEET_SCHEME):
        await _check_listens(address)
    with redirect_stdout(sys.stderr):
        await _join(address)
        if os.environ.get("RAY_AUTH_MODE") != "token":  # Ray sets it where it has one for `auto`
            reason = "whoever reaches it can run programs on all nodes; set RAY_AUTH_MODE=token"
            _log.warning("Ray asks nobody for a token", reason=reason)
        try:
            yield Members(_list_members, _start_agent)
        finally:
            await asyncio.to_thread(ray.shutdown)


async def _join(address: str) -> None:
    try:
        # On a thread: on the main one Ray takes SIGTERM for itself.
        await asyncio.to_thread(
            ray.init,
            address=address.removeprefix(FLEET_SCHEME),
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        problem = _first_line(error)
        if problem.startswith(NOT_LET_IN):  # its port is open: it is not away
            problem += "; does it ask for another token (RAY_AUTH_MODE, RAY_AUTH_TOKEN)?"
        raise InvalidRequest.of("fleet", f"{address}: {problem}") from error


async def _check_listens(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for minutes."""
    host, _, port = address.removeprefix(FLEET_SCHEME).rpartition(":")
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await hear(connecting, limit_s=config.FLEET_SILENT_S)
    except OSError as error:  # TimeoutError among them
        problem = error.strerror or f"no answer for {config.FLEET_SILENT_S:.0f} s"
        raise InvalidRequest.of("fleet", f"{address}: {problem}") from error
    writer.close()


async def _list_members() -> list[Member]:
    """Return the living nodes that offer the resource."""
    try:
        nodes = await asyncio.to_thread(ray.nodes)
    except (RayError, ConnectionError, RuntimeError) as error:
        raise NodeLost(_first_line(error)) from error
    return [
        Member(node["NodeID"], _name_of(node), node["NodeManagerAddress"])
        for node in nodes
        if node["Alive"] and node["Resources"].get(RESOURCE)
    ]


def _name_of(node: Mapping[str, Any]) -> str:
    name = node["Labels"].get(NAME_LABEL) or node["NodeID"][:8]
    return str(name).replace("/", "-").replace(JOINT, "-")


async def _start_agent(member: Member) -> RayNode:
    """Return the node's agent; it outlives this controller, whose successor finds it by name."""
    try:
        return RayNode(await asyncio.to_thread(_make_actor, member))
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise NodeLost(_first_line(error)) from error


def _make_actor(member: Member) -> Any:  # noqa: ANN401 - see RayNode
    affinity = NodeAffinitySchedulingStrategy(member.id, soft=False)
    return (
        ray.remote(NodeAgent)
        .options(
            name=f"agent-{member.id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            runtime_env={"env_vars": AGENT_SETTINGS},
            max_concurrency=CALLS_AT_ONCE_MAX,
            scheduling_strategy=affinity,
        )
        .remote(member.name, member.address)
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, RayTaskError):  # whose own text begins with where it was raised
        error = error.cause
    return next(iter(str(error).splitlines()), type(error).__name__)
