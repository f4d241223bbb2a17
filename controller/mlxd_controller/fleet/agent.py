"""What runs on each node: a launcher and a probe of that machine, behind one method. Knows no Ray.

Invariants:
- It follows one controller, by its epoch: a later one takes it over, an earlier one is refused, and
  so is every call before the first `take`.
- A controller that has called nothing for its orphan grace and the time of silence is gone: all
  workers are ended. So nothing of a node that is cut off runs for ever.
- What the system refuses is answered as MachineShort: a call that ends otherwise loses the node.
- A worker is known by its incarnation. Its end is answered once; `abandon` ends one at whatever
  stage, so that a launch that nobody waits for leaves nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from mlxd_controller.fleet.errors import EpochPassed, close_answer
from mlxd_controller.fleet.facts import AgentOptions, Ended, Kept, Launched, Lines, NodeReport
from mlxd_controller.fleet.files import NodeFiles
from mlxd_controller.fleet.machine import Machine, OwnMachine
from mlxd_controller.fleet.offers import Offers
from mlxd_controller.memory.device import family_of, oom_kills, resident_bytes
from mlxd_controller.pulling.asked import AskedDownloads
from mlxd_controller.pulling.process import fetch
from mlxd_controller.runtime.ports import DeviceProbe, Holding, Launcher, WorkerProcess
from mlxd_models.files.model_files import machine_short
from mlxd_shared import config
from mlxd_shared.domain.devices import JOINT
from mlxd_shared.domain.errors import MachineShort, MlxdError, WorkerStartFailed
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.machine import memory_of, this_machine

Method = Callable[..., Coroutine[Any, Any, Any]]
OUTPUT_BYTES_MAX = 64 * config.KIB
"""Of each worker's output, in one report."""
_log = get_logger("agent")


class NodeAgent:
    """One node's agent. Every public call is made on one event loop."""

    def __init__(
        self,
        node: str,
        host: str,
        *,
        machine: Machine | None = None,
        files: NodeFiles | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Serve as `node`, whose workers listen at `host`; nothing is started yet.

        machine: replaces this process's machine. files: replaces the user's own caches and stores.
        environment: replaces this process's for downloads; it says which hub, and who asks it.
        """
        self._node = node
        self._machine = OwnMachine(node, host) if machine is None else machine
        self._files = files or NodeFiles()
        offers = Offers(self._files.find)
        environment = os.environ if environment is None else environment
        self._pulls = AskedDownloads(
            lambda: self._files.stores.hub_cache,
            partial(fetch, environment=environment),
            environment=environment,
        )
        self._identity = this_machine(node)
        self._version = importlib.metadata.version("mlxd")
        self._epoch = 0
        self._options: AgentOptions | None = None
        self._launcher: Launcher | None = None
        self._probe: DeviceProbe | None = None
        self._measured: NodeReport | None = None
        self._workers: dict[str, WorkerProcess] = {}
        self._holdings: dict[str, Holding] = {}
        self._of_ranks: set[str] = set()
        """Workers of several ranks, by incarnation."""
        self._launching: dict[str, asyncio.Task[WorkerProcess]] = {}
        self._turn: asyncio.Lock | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._methods: Mapping[str, Method] = {
            "keep": self._keep,
            "release": self._release,
            "report": self._report,
            "launch": self._launch,
            "ended": self._wait_ended,
            "end": self._end,
            "abandon": self._abandon,
            "remember": self._remember,
            "list_models": self._files.list_models,
            "describe_ranks": self._files.describe_ranks,
            "find_model": self._files.find,
            "pull_model": self._pulls.ask,
            "leave_pull": self._pulls.leave,
            "offer_model": offers.offer,
            "read_part": offers.read,
            "sum_file": offers.sha256,
            "begin_copy": self._files.begin,
            "write_copy": self._files.write,
            "check_copy": self._files.check,
            "finish_copy": self._files.finish,
        }

    async def call(self, method: str, epoch: int, *args: Any) -> Any:  # noqa: ANN401 - of a method
        """Return what a method answers, or the error that it raised as `errors.Failed`."""
        try:
            self._check(method, epoch)
            if method == "take":
                return await self._take(epoch, *args)
            self._hear()
            return await self._methods[method](*args)
        except (MlxdError, EpochPassed) as error:
            return close_answer(error)
        except OSError as error:
            # No loss of the node: the agent lives, and so do its workers.
            return close_answer(_refusal(error, f"{method} on node {self._node}"))

    def _check(self, method: str, epoch: int) -> None:
        """Refuse a controller that is not the one to follow, nor becomes it."""
        if epoch < self._epoch or (epoch > self._epoch and method != "take"):
            raise EpochPassed(self._node, self._epoch)

    async def _take(self, epoch: int, options: AgentOptions) -> tuple[Kept, ...]:
        """Follow a controller; return the workers of an earlier one that it may adopt.

        None of these if it wants workers to be started in another way: they are ended then.
        """
        self._epoch = epoch
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if options != self._options:
                if self._options is None or options.of_workers != self._options.of_workers:
                    await self._end_all()
                self._launcher = self._machine.launcher(options)
                self._probe = self._machine.probe(options)
                self._options = options
                self._files.stores = options.stores
            self._hear()
            living = [w for w in self._workers.values() if w.exit_code is None]
            return tuple(
                Kept(_describe(worker), self._holdings[worker.incarnation])
                for worker in living
                if worker.incarnation in self._holdings
            )

    async def _keep(self, incarnations: Collection[str]) -> None:
        """End all workers but these, and all launches."""
        await self._end_all(but=incarnations)

    async def _release(self) -> None:
        """End everything; the next call is a `take`, if any comes."""
        await asyncio.gather(self._end_all(), self._pulls.aclose())
        self._machine.close()
        self._options = None

    async def _report(self, read: Mapping[str, int]) -> NodeReport:
        """Return the node as it is; `read` numbers the output that was reported of each worker.

        Raises:
            MachineShort: it could not be measured even once.
        """
        assert self._probe is not None
        living = {k: w for k, w in self._workers.items() if w.exit_code is None}
        of_ranks = {worker.pid: k in self._of_ranks for k, worker in living.items()}
        try:
            self._measured = await asyncio.to_thread(self._measure, self._probe, of_ranks)
        except OSError as error:  # no file can be opened just now: the last figures stay in force
            _log.warning("memory cannot be measured", reason=error.strerror)
            if self._measured is None:
                raise _refusal(error, "its memory is not measured") from error
        output = tuple(_output(living[k], begin) for k, begin in read.items() if k in living)
        return replace(self._measured, output=output)

    def _measure(self, probe: DeviceProbe, of_ranks: Mapping[int, bool]) -> NodeReport:
        """Return the node's figures. Blocks: it reads files of the system's.

        of_ranks: whether a worker has several ranks, which are its children, by its process id.
        """
        families = (family_of(pid) if several else (pid,) for pid, several in of_ranks.items())
        pids = list(chain.from_iterable(families))
        return NodeReport(
            version=self._version,
            devices=tuple(
                replace(device, name=f"{self._node}/{device.name}", node=self._node)
                for device in probe.read(pids)
            ),
            memory=memory_of(self._identity, resident_nbytes=resident_bytes(pids)),
            oom_kills=oom_kills(),
        )

    async def _launch(self, model: str, incarnation: str, device: str) -> Launched:
        """Start a worker; raises what the launcher does."""
        assert self._launcher is not None
        launching = asyncio.create_task(
            self._launcher.launch(model=model, incarnation=incarnation, device=device)
        )
        self._launching[incarnation] = launching
        try:
            await asyncio.wait({launching})
        finally:
            del self._launching[incarnation]
        if launching.cancelled():
            raise WorkerStartFailed(model, ("the launch was given up",))
        worker = launching.result()
        self._workers[incarnation] = worker
        if JOINT in device:
            self._of_ranks.add(incarnation)
        return _describe(worker)

    async def _wait_ended(self, incarnation: str, model: str) -> Ended:
        """Return the end of a worker, once it has come."""
        worker = self._workers.get(incarnation)
        if worker is None:
            raise WorkerStartFailed(model, (f"node {self._node} has no worker {incarnation}",))
        code = await worker.wait_exited()
        self._drop(incarnation)
        return Ended(code, _last(worker), await asyncio.to_thread(oom_kills))

    async def _end(self, incarnation: str) -> None:
        """End a worker; nothing happens where it is not there any more."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            await worker.close()

    async def _abandon(self, incarnation: str) -> None:
        """End a worker, or the launch that is to make it."""
        launching = self._launching.get(incarnation)
        if launching is not None:
            launching.cancel()
            await asyncio.wait({launching})
        await self._end(incarnation)
        self._drop(incarnation)

    async def _remember(self, incarnation: str, holding: Holding | None) -> None:
        """Note what a worker holds for a later controller."""
        if holding is None:
            self._holdings.pop(incarnation, None)
        elif incarnation in self._workers:
            self._holdings[incarnation] = holding

    def _drop(self, incarnation: str) -> None:
        self._workers.pop(incarnation, None)
        self._holdings.pop(incarnation, None)
        self._of_ranks.discard(incarnation)

    def _hear(self) -> None:
        """Note that the controller lives."""
        if self._silence is not None:
            self._silence.cancel()
        if self._options is not None:
            patience_s = self._options.orphan_grace_s + self._options.silent_s
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(patience_s, self._note_silence)

    def _note_silence(self) -> None:
        self._silence = None
        if self._workers or self._launching:
            _log.warning("the controller is gone; ending its workers", workers=len(self._workers))
            self._ending = asyncio.create_task(self._end_all())

    async def _end_all(self, *, but: Collection[str] = ()) -> None:
        known = {*self._workers, *self._launching}
        await asyncio.gather(*(self._abandon(each) for each in known if each not in but))


def _refusal(error: OSError, doing: str) -> MlxdError:
    """Return what the system refuses, as an error that travels."""
    return machine_short(error, doing) or MachineShort("what this takes", f"{doing}: {error}")


def _describe(worker: WorkerProcess) -> Launched:
    return Launched(worker.incarnation, worker.pid, worker.address)


def _output(worker: WorkerProcess, begin: int) -> Lines:
    kept = worker.output
    piece = kept.read(begin, end=kept.end, nbytes_max=OUTPUT_BYTES_MAX)
    return Lines(worker.incarnation, piece.lines, piece.end)


def _last(worker: WorkerProcess) -> Lines:
    return Lines(worker.incarnation, worker.last_lines(), worker.output.end)
