"""One decision in the making: the state so far and the actions so far. Never leaves `decide`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mlxd_controller.core.actions import (
    AbortStreams,
    Action,
    Done,
    Grant,
    Refuse,
    StopWorker,
)
from mlxd_controller.core.state import (
    COLD,
    NOTHING_FIXED,
    Model,
    Phase,
    Progress,
    State,
    StopReason,
    Want,
)
from mlxd_shared import config
from mlxd_shared.errors import MlxdError, ModelUnloaded, QueueFull, ShuttingDown
from mlxd_shared.retry_times import retry_after_s


@dataclass(slots=True)
class Turn:
    """Collects what one event changes. Small verbs that several events share."""

    state: State
    now_s: float
    actions: list[Action] = field(default_factory=list)

    def put(self, model: Model) -> Model:
        """Take `model` into the state and return it."""
        self.state = self.state.with_model(model)
        return model

    def do(self, action: Action) -> None:
        """Ask for one more action."""
        self.actions.append(action)

    def refuse_full(self, ticket: str, queue: str, limit: int) -> None:
        """Refuse one for whom a queue has no place; those refused are told to come back apart."""
        refused = self.state.refused + 1
        self.state = replace(self.state, refused=refused)
        self.do(Refuse(ticket, QueueFull(queue, limit, retry_after_s(refused))))

    def refuse_waiters(self, model: Model, error: MlxdError) -> Model:
        """Refuse everybody who waits for `model`."""
        for waiter in model.waiters:
            self.do(Refuse(waiter.ticket, error))
        return self.put(replace(model, waiters=(), wanted=False))

    def serve_waiters(self, model: Model) -> Model:
        """Give every waiter of a ready model what it waits for."""
        assert model.phase is Phase.READY
        leases = set(model.leases)
        for waiter in model.waiters:
            if waiter.want is Want.LOAD:
                self.do(Done(waiter.ticket))
                continue
            leases.add(waiter.ticket)
            self.do(Grant(waiter.ticket, model.worker, self.now_s - waiter.since_s))
        return self.put(
            replace(
                model,
                waiters=(),
                wanted=False,
                before=None,
                held_until_s=-math.inf,
                leases=frozenset(leases),
                last_used_s=self.now_s,
            )
        )

    def stop_worker(self, model: Model, reason: StopReason) -> Model:
        """Begin to unload a model that nobody uses."""
        assert model.phase in (Phase.LOADING, Phase.READY, Phase.DRAINING)
        assert not model.leases
        model = replace(model, held_until_s=-math.inf)
        self.do(StopWorker(model.worker, model.digest, reason))
        return self.put(replace(model, phase=Phase.UNLOADING, drain_until_s=math.inf))

    def drain(self, model: Model, *, until_s: float, reason: StopReason) -> Model:
        """Take no new lease; stop the worker when the last one ends or at `until_s`."""
        draining = replace(
            model,
            phase=Phase.DRAINING,
            drain_until_s=until_s,
            drain_reason=reason,
            held_until_s=-math.inf,
        )
        return self.stop_worker(draining, reason) if not model.leases else self.put(draining)

    def abort(self, model: Model) -> Model:
        """End all streams of a draining model, and begin to unload it."""
        error: MlxdError = (
            ShuttingDown()
            if model.drain_reason is StopReason.SHUTDOWN
            else ModelUnloaded(model.name)
        )
        tickets = tuple(sorted(model.leases))
        self.do(AbortStreams(tickets, error))
        ended = replace(
            model, leases=frozenset(), streams_aborted=model.streams_aborted + len(tickets)
        )
        return self.stop_worker(ended, model.drain_reason)

    def gone(self, model: Model, phase: Phase, error: MlxdError | None) -> Model:
        """Note that no process serves `model` any more; unloads that wait for this are done."""
        for ticket in model.unloaders:
            self.do(Done(ticket, model.streams_aborted))
        return self.put(
            replace(
                model,
                phase=phase,
                stuck=False,
                backing_off=False,
                held_until_s=-math.inf,
                error=error,
                plan=None,
                plans=(),
                worker=0,
                before=None,
                leases=frozenset(),
                unloaders=(),
                streams_aborted=0,
                drain_until_s=math.inf,
                shrink_until_s=-math.inf,
                shrink_again_s=-math.inf,
                drain_reason=StopReason.ASKED,
                progress=Progress(),
            )
        )

    def failed(self, model: Model, error: MlxdError) -> Model:
        """Note that a worker failed; after too many in a row the next one has to wait.

        A crash loop must not eat the machine: each start reads the weights anew.
        """
        steady = self.now_s - model.ready_s >= config.STEADY_S and model.phase is Phase.READY
        failures = 1 if steady else model.failures + 1
        retry_s = model.retry_s
        if failures > config.RESTARTS_AT_ONCE:
            doublings = min(failures - config.RESTARTS_AT_ONCE - 1, 8)
            pause_s = config.RESTART_BACKOFF_S * 2**doublings
            retry_s = self.now_s + min(pause_s, config.RESTART_BACKOFF_MAX_S)
        model = replace(model, failures=failures, retry_s=retry_s)
        return self.gone(model, Phase.FAILED, error)

    def forget_options(self, model: Model) -> Model:
        """Drop what an operator fixed for this load; the next one starts from the defaults."""
        return self.put(
            replace(
                model,
                spec=NOTHING_FIXED,
                pinned=False,
                failures=0,
                retry_s=-math.inf,
                before=None,
                wanted=False,
                keep_alive_s=self.state.keep_alive_s,
            )
        )

    def forget_one_of(self, known_max: int) -> None:
        """Where so many models are known, forget the one that was used longest ago, if it is cold.

        A folder whose files change is another model each time; nothing else would ever forget one.
        """
        models = self.state.models
        if len(models) < known_max:
            return
        cold = [m for m in models.values() if m.phase in COLD and self.now_s >= m.retry_s]
        if cold:
            oldest = min(cold, key=lambda m: (max(m.last_used_s, m.usage.at_s), m.digest))
            kept = {digest: m for digest, m in models.items() if m is not oldest}
            self.state = replace(self.state, models=kept)

    def models(self) -> Iterable[Model]:
        """All models, as they are now, in a fixed order."""
        return [self.state.models[digest] for digest in sorted(self.state.models)]
