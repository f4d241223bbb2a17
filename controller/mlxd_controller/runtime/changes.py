"""Changes of models for watchers: bounded, in order, never blocking the runtime.

A reader sees every phase that a model goes through, in order. Within one phase a slow reader gets
only the latest change; one that falls WATCH_QUEUE_MAX changes behind gets QueueFull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mlxd_controller.core.phases import Loading, Ready
from mlxd_controller.core.state import Model
from mlxd_shared import config
from mlxd_shared.domain.errors import QueueFull

WATCH_QUEUE_MAX = 1024


class Subscription:
    """One reader's queue of changes."""

    def __init__(self, digest: str | None) -> None:
        self._digest = digest
        self._pending: list[Model] = []
        self._news = asyncio.Event()
        self._overflowed = False

    def offer(self, model: Model) -> None:
        """Add a change, unless it is another model's."""
        if self._digest not in (None, model.digest):
            return
        same = [i for i, other in enumerate(self._pending) if other.digest == model.digest]
        if same and type(self._pending[same[-1]].phase) is type(model.phase):
            self._pending[same[-1]] = model
        elif len(self._pending) >= WATCH_QUEUE_MAX:
            self._overflowed = True
        else:
            self._pending.append(model)
        self._news.set()

    async def next(self) -> Model:
        """Return the next change, waiting for it.

        Raises:
            QueueFull: changes were lost, because the reader is too slow.
        """
        await self._news.wait()
        if self._overflowed:
            raise QueueFull("changes not read yet", WATCH_QUEUE_MAX)
        model = self._pending.pop(0)
        if not self._pending:
            self._news.clear()
        return model

    def pending(self) -> list[Model]:
        """Return, and take, the changes that are there already."""
        models, self._pending = self._pending, []
        self._news.clear()
        return models


class Changes:
    """Publishes changes to all subscriptions. One owner: the event loop's thread."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    @contextmanager
    def subscribe(self, digest: str | None = None) -> Iterator[Subscription]:
        """Receive every change from now on, of one model or of all.

        Raises:
            QueueFull: there are WATCHERS_MAX subscriptions already.
        """
        if len(self._subscriptions) >= config.WATCHERS_MAX:
            raise QueueFull("watchers", config.WATCHERS_MAX)
        subscription = Subscription(digest)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def publish(self, before: Model | None, after: Model) -> None:
        """Publish `after` if watchers can see how it differs from `before`."""
        if before is None or _visible(before) != _visible(after):
            for subscription in self._subscriptions:
                subscription.offer(after)


def _visible(model: Model) -> tuple[object, ...]:
    """Return what watchers see: leases and times of use change with every request."""
    phase = model.phase
    progress = phase.progress if isinstance(phase, Loading) else None
    return (
        type(phase), progress, model.error, model.plan, model.worker, model.pinned,
        model.keep_alive_s, model.spec, model.name, model.path,
    )  # fmt: skip


def same_but_measured(former: Model | None, model: Model) -> bool:
    """Return whether only the measured memory has changed, which nobody watches."""
    if former is None or former.measured is model.measured:
        return False
    if not isinstance(former.phase, Ready) or not isinstance(model.phase, Ready):
        return False
    measured = replace(former.phase, plan=model.phase.plan)
    return replace(former, phase=measured, measured=model.measured) == model
