"""Relays one Generate from worker to worker until it ends: lease, relay, continue after a loss.

Invariants:
- A lease is held from before the first byte until after the last; it is always released.
- While a stream has one worker, its messages are relayed unparsed, and kept as bytes. After a loss
  the next worker gets the prompt, the tokens so far and the seed, and its messages are checked.
- Streams ended by an operator, a shutdown or their own request are not continued.
- A stream is whole once its finish has arrived, whatever becomes of the call that carried it.
- Every wait and count has a limit; a prompt that workers die of is refused (`quarantine`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from mlxd.v1 import inference_pb2
from mlxd_controller.runtime.ports import ModelRef, RawStream
from mlxd_controller.runtime.runtime import Lease, Runtime
from mlxd_controller.services.journal import Journal
from mlxd_controller.services.losses import GONE, LEAVING_WAIT_S, explain, link_of, model_wait_s
from mlxd_controller.services.meter import Meter
from mlxd_controller.services.quarantine import PromptKey, Quarantine
from mlxd_shared.domain import errors as e
from mlxd_shared.domain.requests import GenerateSpec
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.intake import as_checked
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import duration_to_pb
from mlxd_shared.wire.status import RemoteError

MOVES_MAX = 16
"""How many more workers a request may be sent to."""
STARTS_MAX = 1
"""How many more loads a request may wait for after one that a signal ended."""
QUEUED_MAX_S = 60.0
"""How long a stream that has begun waits for a place in the queue of a full worker."""
QUEUED_STEP_S = 2.0  # at most, before it tries again
_log = get_logger("inference")


class _BadWorker(Exception):
    """A live worker sent what cannot be the stream's next message: a bug in the worker."""


class Relay:
    """Serves one request.

    It stays as it came; `changes` are set behind its fields, anew for each worker that it is sent
    to. `key` identifies its prompt in the quarantine.
    """

    def __init__(
        self,
        runtime: Runtime,
        quarantine: Quarantine,
        *,
        ref: ModelRef,
        spec: GenerateSpec,
        request: inference_pb2.GenerateRequest,
        changes: inference_pb2.GenerateRequest,
        meter: Meter,
        key: PromptKey,
    ) -> None:
        self._runtime = runtime
        self._quarantine = quarantine
        self._ref = ref
        self._spec = spec
        self._request = request
        self._changes = changes
        self._meter = meter
        self._key = key
        self._journal = Journal(spec.resumed)
        self._moves = self._migrations = self._starts = 0
        self._waited_s = self._queued_s = 0.0
        self._has_frame = False

    async def frames(self, context: Context) -> AsyncGenerator[bytes, None]:
        """Yield the stream's messages, serialised.

        Raises:
            PoisonPrompt: workers have died of this prompt.
            WorkerLost: the worker died, and the stream cannot or may not continue.
            MlxdError: the scheduler or the worker refused it.
        """
        try:
            while True:
                await self._check_prompt()
                async with AsyncExitStack() as trial:
                    async with AsyncExitStack() as leases:
                        lease = await self._acquire_lease(leases, context)
                        await self._enter_trial(trial)
                        loss: e.MlxdError
                        try:
                            async with aclosing(self._relay(lease, trial, context)) as frames:
                                async for frame in frames:
                                    yield frame
                        except GONE as error:
                            if lease.aborted is not None:
                                raise
                            loss = error
                        except e.QueueFull as error:
                            if not self._journal.messages:
                                raise
                            loss = error
                        except _BadWorker as error:
                            raise self._lost_error(str(error)) from error
                        else:
                            return
                    await self._move(loss, lease, context)
        except BaseException:
            generated = self._journal.offset - len(self._spec.resumed)
            self._meter.note_break(generated, prompt_tokens=self._journal.prompt_tokens)
            raise

    async def _check_prompt(self) -> None:
        """Raise PoisonPrompt if workers have died of this prompt."""
        if self._quarantine.has_suspects:
            self._quarantine.check(await self._key.get(), self._ref.name)

    async def _enter_trial(self, trial: AsyncExitStack) -> None:
        """Have `trial` hold the model's place for suspects, if this prompt is one."""
        if self._quarantine.has_suspects:
            key, ref = await self._key.get(), self._ref
            await trial.enter_async_context(
                self._quarantine.trial(key, digest=ref.digest, model=ref.name)
            )

    async def _acquire_lease(self, leases: AsyncExitStack, context: Context) -> Lease:
        """Return a lease held by `leases`; ask again after a load that a signal ended.

        For a stream that has begun, a refusal counts as a loss.
        """
        while True:
            lease_context = self._runtime.lease(
                self._ref,
                keep_alive_s=self._spec.keep_alive_s,
                timeout_s=model_wait_s(context.time_remaining()),
            )
            try:
                lease = await leases.enter_async_context(lease_context)
            except (e.ModelUnloaded, e.ShuttingDown):
                raise
            except e.MlxdError as error:
                killed = isinstance(error, e.WorkerExited) and error.code < 0
                self._starts += 1
                if killed and self._starts <= STARTS_MAX and self._spec.migrate:
                    continue
                if not self._journal.messages:
                    raise
                raise self._lost_error(error.describe()) from error
            self._waited_s += lease.waited_s
            return lease

    async def _relay(
        self, lease: Lease, trial: AsyncExitStack, context: Context
    ) -> AsyncGenerator[bytes, None]:
        """Yield one worker's messages from the current offset; the first one ends `trial`."""
        self._prepare()
        self._has_frame = False
        if (code := lease.worker.exit_code) is not None:  # it ended during the wait for the trial
            raise self._lost_error(lease.worker.describe_end(code))
        try:
            stream = link_of(lease).generate(
                as_checked(self._request, self._changes, ids=self._journal.offset),
                timeout_s=context.time_remaining(),
            )
        except RemoteError as error:
            raise await explain(error, lease, self._journal.offset) from error
        lease.stream = stream
        lease.worker.streams[stream] = None
        last, is_lost = b"", False
        try:
            while (frame := await self._read(stream, lease)) is not None:
                last = self._adapt(frame) if self._migrations else frame
                self._meter.note_frame()
                if not self._has_frame:
                    self._has_frame = True
                    if self._quarantine.has_suspects:
                        self._quarantine.clear(await self._key.get())
                    await trial.aclose()
                self._journal.add(last)
                yield last
        except e.MlxdError as error:
            is_lost = isinstance(error, e.WorkerLost)
            # After the finish only the call's status is missing: nothing is left to generate.
            if not _parse(last).HasField("finish"):
                raise
        finally:
            stream.cancel()
            if not is_lost:
                del lease.worker.streams[stream]
        message = _parse(last)
        if not message.HasField("finish"):
            raise _BadWorker("the stream ended without a finish")
        self._meter.complete(message)

    def _prepare(self) -> None:
        """Change the request to the stream's current position."""
        changes, journal = self._changes, self._journal
        changes.load_duration.CopyFrom(duration_to_pb(self._waited_s))
        changes.age.CopyFrom(duration_to_pb(self._meter.age_s))
        if not journal.messages:
            return
        changes.resume_from = journal.offset
        # Behind those that the client had already, which are the request's own.
        changes.resume_token_ids[:] = journal.token_ids[len(self._spec.resumed) :]
        if journal.seed is not None:
            changes.sampling.seed = journal.seed

    def _adapt(self, frame: bytes) -> bytes:
        """Turn a later worker's message into the next one of a stream that has begun."""
        message = _parse(frame)
        problem = self._journal.check(message)
        if problem:
            raise _BadWorker(problem)
        if not self._has_frame:
            for field in ("request_id", "model_digest", "seed", "prompt", "prompt_tokens"):
                message.ClearField(field)
        if message.HasField("finish"):
            message.usage.migrations = self._migrations
        return message.SerializeToString()

    async def _read(self, stream: RawStream, lease: Lease) -> bytes | None:
        """Return the next message; raise what ended the stream, first of all our own abort."""
        if lease.aborted is not None:
            raise lease.aborted
        try:
            frame = await stream.read()
        except RemoteError as error:
            raise await explain(error, lease, self._journal.offset) from error
        if frame is None and lease.aborted is not None:
            raise lease.aborted
        return frame

    async def _move(self, loss: e.MlxdError, lease: Lease, context: Context) -> None:
        """Return once the stream may be sent again: to the next worker, if the last one was lost.

        Raises:
            MlxdError: `loss`, if it may not; PoisonPrompt.
        """
        if isinstance(loss, e.QueueFull):
            await self._queue_again(loss, context)
            return
        begun = self._journal.messages > 0
        lost = isinstance(loss, e.WorkerLost)
        if begun and not lost:
            loss = self._lost_error(loss.describe())
        stays = isinstance(loss, e.WorkerLost) and not self._spec.migrate
        silent = lost and not self._has_frame
        key = await self._key.get() if silent else b""  # before: a death is noted at once
        ended = await lease.worker.wait_ended(wait_s=0.0 if stays else LEAVING_WAIT_S)
        if silent and ended and self._runtime.may_have_died_of(lease):
            self._quarantine.note_death(key, lease.worker.incarnation)
        self._moves += 1
        if stays or not ended or self._moves > MOVES_MAX:
            raise loss
        if self._journal.problem:
            raise self._lost_error(self._journal.problem)
        await self._check_prompt()
        self._migrations += begun
        kind = "ongoing_request" if begun else "new_request"
        self._runtime.metrics.migrations.add(model=self._ref.name, type=kind)
        _log.warning("sent to another worker", reason=loss.describe(), offset=self._journal.offset)

    async def _queue_again(self, full: e.QueueFull, context: Context) -> None:
        """Wait, within limits, for a place in the queue of a worker that can continue the stream.

        Raises:
            WorkerLost: there will be none in time.
        """
        wait_s = min(full.retry_after_s, QUEUED_STEP_S)
        left_s = min(QUEUED_MAX_S - self._queued_s, model_wait_s(context.time_remaining()))
        if full.retry_after_s > left_s:
            raise self._lost_error(full.describe())
        self._queued_s += wait_s
        await asyncio.sleep(wait_s)

    def _lost_error(self, cause: str) -> e.WorkerLost:
        return e.WorkerLost(self._ref.name, self._journal.offset, cause)


def _parse(frame: bytes) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse.FromString(frame)
