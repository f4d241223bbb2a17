"""The models of a fleet: this machine's own, and behind them those that only its nodes have.

Invariants:
- A name means what it means to this machine's store. Only a name that nothing here has is looked
  for on nodes; of two nodes with one name the first, by its own name, has it. NODE:NAME is always
  a name of a node's model. A model has the names that all nodes give it: one that has fetched it
  from a hub knows it by its commit alone.
- What is here is never taken for a node's: a digest that this machine's store has is its model.
- A model of a node's says whose disk its path is on: this machine's paths say nothing of others.
- Nodes are asked side by side, at most once in FLEET_LISTING_S. One that does not answer, or is
  lost, keeps what it has said: its models may have been copied to others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.node import Node
from mlxd_controller.runtime.describing import LaterDivision
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import BrokenRef, ModelRef, ModelStore
from mlxd_controller.store.load_defaults import LoadDefaults, find_defaults
from mlxd_controller.store.naming import only_match
from mlxd_controller.store.shelf import is_name
from mlxd_models.fit.facts import Division, Parts
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, ModelNotFound, PullFailed
from mlxd_shared.ops.logs import get_logger

_log = get_logger("fleet")


class FleetStore:
    """Implements ports.ModelStore. Paths, names that loads give, and aliases are this machine's."""

    def __init__(
        self,
        own: ModelStore,
        nodes: Mapping[str, Node],
        *,
        load_defaults: LoadDefaults = MappingProxyType({}),
    ) -> None:
        """Ask nobody yet. load_defaults: the configured defaults for loads."""
        self._own = own
        self._nodes = nodes
        self._load_defaults = load_defaults
        self._listed: dict[str, tuple[ModelRef, ...]] = {}
        self._refs: dict[str, ModelRef] = {}
        self._names: dict[str, ModelRef] = {}
        self._divisions: dict[str, Division] = {}
        self._turn = asyncio.Lock()
        self._due_s = -math.inf

    async def resolve(self, name: str) -> ModelRef:
        """Return the model for a name, alias or digest; see the port."""
        try:
            return await self._own.resolve(name)
        except ModelNotFound:
            await self._look()
            ref = self._names.get(name) or only_match(name, self._refs)
            if ref is None:
                raise
            return self._own.find_known(ref.digest) or ref

    def only_name(self) -> str:
        """Return the default name: the only one named to the server."""
        return self._own.only_name()

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return the model of a folder of this machine; see the port."""
        return await self._own.inspect(path, name=name)

    async def add(
        self, path: Path, *, name: str, in_use: Callable[[], Collection[str]] = tuple
    ) -> ModelRef:
        """Add a folder of this machine; see the port."""
        return await self._own.add(path, name=name, in_use=in_use)

    def use(self, name: str) -> None:
        """Note a request for this name; see the port."""
        self._own.use(name)

    async def forget(
        self, name: str, *, in_use: Callable[[], Collection[str]] = tuple
    ) -> tuple[str, ...]:
        """Forget a name that a load gave; see the port."""
        return await self._own.forget(name, in_use=in_use)

    def telling(self, listener: Callable[[str], None]) -> AbstractContextManager[None]:
        """Report each forgotten name while the body runs; see the port."""
        return self._own.telling(listener)

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once, sorted by name."""
        await self._look()
        own = await self._own.list_models()
        digests = {ref.digest for ref in own if isinstance(ref, ModelRef)}
        further = (ref for ref in self._refs.values() if ref.digest not in digests)
        return tuple(sorted((*own, *further), key=lambda ref: ref.name))

    def find_known(self, digest: str) -> ModelRef | None:
        """Return the model with this digest, as it was last read."""
        return self._own.find_known(digest) or self._refs.get(digest)

    async def _look(self) -> None:
        """Know what nodes have, as of a moment ago."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            if clock() < self._due_s:
                return
            reached = [node for node in self._nodes.values() if not node.lost]
            await asyncio.gather(*map(self._ask, reached))
            own = await self._own.list_models()
            aliases = (alias for ref in own if isinstance(ref, ModelRef) for alias in ref.aliases)
            self._arrange({*(ref.name for ref in own), *aliases})
            self._due_s = clock() + config.FLEET_LISTING_S

    async def _ask(self, node: Node) -> None:
        try:
            refs = await hear(node.list_models(), limit_s=config.FLEET_SILENT_S)
        except (NodeLost, MlxdError, TimeoutError) as error:
            reason = str(error) or f"no answer for {config.FLEET_SILENT_S:.0f} s"
            _log.warning("models not listed", node=node.name, reason=reason)
        else:
            self._listed[node.name] = refs

    async def _describe_ranks(self, digest: str) -> Parts:
        """Return what ranks have of a model, as one of the nodes that has it describes it.

        Raises:
            MlxdError: why none of them can.
        """
        problem = "it is not reached"
        for name, refs in sorted(self._listed.items()):
            node = self._nodes.get(name)
            if node is None or all(ref.digest != digest for ref in refs):
                continue
            try:
                return await node.describe_ranks(digest)
            except (NodeLost, MlxdError) as error:
                problem = str(error)
        raise PullFailed(f"no machine that has the model can describe its ranks' parts: {problem}")

    def _arrange(self, taken: Collection[str]) -> None:
        """Give each model its names: none of `taken`, which are this machine's."""
        owners: dict[str, str] = {}
        refs: dict[str, ModelRef] = {}
        plain: dict[str, set[str]] = {}
        of_nodes: dict[str, list[str]] = {}
        for node, listed in sorted(self._listed.items()):
            for ref in listed:
                first = refs.setdefault(ref.digest, replace(ref, machine=node))
                refs[ref.digest] = replace(first, origin=first.origin or ref.origin)
                own = plain.setdefault(ref.digest, set())
                for name in {ref.name, *ref.aliases}.difference(taken):
                    if owners.setdefault(name, ref.digest) == ref.digest:
                        own.add(name)
                of_node = f"{node}:{ref.name}"
                of_nodes.setdefault(ref.digest, []).extend([of_node] if is_name(of_node) else [])
        self._refs, self._names = {}, {}
        divisions, self._divisions = self._divisions, {}
        for digest, ref in refs.items():
            names = [*sorted(plain[digest]), *of_nodes[digest]] or [digest]
            fixed = find_defaults(self._load_defaults, (*names, digest))
            division = divisions.get(digest)
            if division is None or division.problem:
                division = LaterDivision(partial(self._describe_ranks, digest))
            self._divisions[digest] = division
            known = replace(
                ref,
                name=names[0],
                aliases=tuple(names[1:]),
                configured=fixed,
                facts=replace(ref.facts, division=division),
            )
            self._refs[digest] = known
            self._names |= dict.fromkeys(names, known)
