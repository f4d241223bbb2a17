"""One decision in the making: the state so far and the actions so far. Never leaves `decide`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mlxd_controller.core import actions as a
from mlxd_controller.core import phases
from mlxd_controller.core.demand import NO_DEMAND, Waiter, Want
from mlxd_controller.core.options import with_configured
from mlxd_controller.core.state import Model, State
from mlxd_shared import config
from mlxd_shared.domain import errors as e
from mlxd_shared.domain.retry_times import retry_after_s


@dataclass(slots=True)
class Turn:
    """Collects what one event changes. Small verbs that several events share."""

    state: State
    now_s: float
    actions: list[a.Action] = field(default_factory=list)

    def put(self, model: Model) -> Model:
        """Take `model` into the state and return it."""
        self.state = self.state.with_model(model)
        return model

    def do(self, action: a.Action) -> None:
        """Ask for one more action."""
        self.actions.append(action)

    def refuse_full(self, ticket: str, queue: str, limit: int) -> None:
        """Refuse one for whom a queue has no place; those refused are told to come back apart."""
        refused = self.state.refused + 1
        self.state = replace(self.state, refused=refused)
        self.do(a.Refuse(ticket, e.QueueFull(queue, limit, retry_after_s(refused))))

    def refuse_waiters(self, model: Model, error: e.MlxdError) -> Model:
        """Refuse everybody who waits for `model`; no load of it is called for any more."""
        for waiter in model.waiters:
            self.do(a.Refuse(waiter.ticket, error))
        return self.put(replace(model, phase=phases.with_demand(model.phase, NO_DEMAND)))

    def serve_waiters(
        self, model: Model, ready: phases.Ready, waiters: tuple[Waiter, ...]
    ) -> Model:
        """Make `model` `ready` and no longer held, and give every waiter what it waits for."""
        leases = set(ready.leases)
        for waiter in waiters:
            if waiter.want is Want.LOAD:
                self.do(a.Done(waiter.ticket))
                continue
            leases.add(waiter.ticket)
            self.do(a.Grant(waiter.ticket, ready.worker, self.now_s - waiter.since_s))
        served = replace(ready, leases=frozenset(leases), hold=None)
        return self.put(replace(model, phase=served, last_used_s=self.now_s))

    def stop_worker(
        self,
        model: Model,
        reason: phases.StopReason,
        *,
        unloaders: tuple[str, ...] = (),
        streams_aborted: int = 0,
    ) -> Model:
        """Begin to unload a model that nobody uses; more `unloaders` may wait for its end."""
        phase = model.phase
        assert isinstance(phase, phases.Loading | phases.Ready | phases.Draining)
        assert not model.leases
        self.do(a.StopWorker(phase.worker, model.digest, reason))
        unloading = phases.Unloading(
            phase.worker,
            phase.plan,
            reason,
            demand=phases.demand_of(phase),
            unloaders=(*model.unloaders, *unloaders),
            streams_aborted=streams_aborted,
        )
        return self.put(replace(model, phase=unloading))

    def drain(
        self,
        model: Model,
        ready: phases.Ready,
        *,
        until_s: float,
        reason: phases.StopReason,
        unloaders: tuple[str, ...] = (),
    ) -> Model:
        """Take no new lease; stop the worker when the last one ends or at `until_s`."""
        if not ready.leases:
            return self.stop_worker(model, reason, unloaders=unloaders)
        draining = phases.Draining(
            ready.worker,
            ready.plan,
            ready.leases,
            until_s,
            reason,
            unloaders,
            ready.shrink_until_s,
        )
        return self.put(replace(model, phase=draining))

    def abort(self, model: Model, draining: phases.Draining) -> Model:
        """End all streams of a draining model, and begin to unload it."""
        reason = draining.reason
        error: e.MlxdError = (
            e.ShuttingDown()
            if reason is phases.StopReason.SHUTDOWN
            else e.ModelUnloaded(model.name)
        )
        tickets = tuple(sorted(draining.leases))
        self.do(a.AbortStreams(tickets, error))
        unused = replace(model, phase=replace(draining, leases=frozenset()))
        return self.stop_worker(unused, reason, streams_aborted=len(tickets))

    def end(self, model: Model, phase: phases.Unloaded | phases.Failed) -> Model:
        """Note that no process serves `model` any more; unloads that wait for this are done."""
        aborted = model.phase.streams_aborted if isinstance(model.phase, phases.Unloading) else 0
        for ticket in model.unloaders:
            self.do(a.Done(ticket, aborted))
        return self.put(replace(model, phase=phase))

    def fail(self, model: Model, error: e.MlxdError) -> Model:
        """Note that a worker failed; after too many in a row the next one has to wait.

        A crash loop must not eat the machine: each start reads the weights anew.
        """
        phase = model.phase
        steady = isinstance(phase, phases.Ready) and self.now_s - phase.since_s >= config.STEADY_S
        failures = 1 if steady else model.failures + 1
        retry_s = model.retry_s
        if failures > config.RESTARTS_AT_ONCE:
            doublings = min(failures - config.RESTARTS_AT_ONCE - 1, 8)
            pause_s = config.RESTART_BACKOFF_S * 2**doublings
            retry_s = self.now_s + min(pause_s, config.RESTART_BACKOFF_MAX_S)
        model = replace(model, failures=failures, retry_s=retry_s)
        return self.end(model, phases.Failed(error))

    def forget_options(self, model: Model) -> Model:
        """Drop what was fixed for this load; the next one starts from the configuration."""
        free = with_configured(model, model.configured, keep_alive_s=self.state.keep_alive_s)
        return self.put(replace(free, failures=0, retry_s=None))

    def forget_one_of(self, known_max: int) -> None:
        """Where so many models are known, forget the one that was used longest ago, if it is cold.

        A folder whose files change is another model each time; nothing else would ever forget one.
        """
        models = self.state.models
        if len(models) < known_max:
            return
        cold = [
            m
            for m in models.values()
            if isinstance(m.phase, phases.Cold) and not phases.lies_ahead(m.retry_s, self.now_s)
        ]
        if cold:
            oldest = min(cold, key=lambda m: (max(m.last_used_s, m.usage.at_s), m.digest))
            kept = {digest: m for digest, m in models.items() if m is not oldest}
            self.state = replace(self.state, models=kept)

    def models(self) -> Iterable[Model]:
        """All models, as they are now, in a fixed order."""
        return [self.state.models[digest] for digest in sorted(self.state.models)]
