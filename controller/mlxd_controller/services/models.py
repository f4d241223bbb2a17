"""ModelService: lists, loads, unloads, forgets, watches and pulls models.

A load belongs to the scheduler and goes on when its client disconnects. Pages are cut by name, so
that changes of the list between pages neither skip nor repeat other models.
"""
# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

import asyncio
import bisect
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from mlxd.v1 import model_pb2, types_pb2
from mlxd_controller.core import actions
from mlxd_controller.core.options import conflict, fill_in
from mlxd_controller.core.phases import Ready
from mlxd_controller.core.report import report
from mlxd_controller.core.state import Model
from mlxd_controller.prefixes.keeper import Keeper
from mlxd_controller.pulling.downloads import Downloads
from mlxd_controller.pulling.wanted import wanted_of
from mlxd_controller.runtime.changes import Subscription
from mlxd_controller.runtime.describing import describe_for
from mlxd_controller.runtime.kept_lines import Piece
from mlxd_controller.runtime.ports import BrokenRef, Clock, ModelRef
from mlxd_controller.runtime.runtime import LOADING_RETRY_S, Lease, Runtime
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.views import broken_to_pb, model_to_pb, report_to_pb
from mlxd_models.fit.facts import Undescribed
from mlxd_models.fit.options import check_options
from mlxd_shared import config
from mlxd_shared.blocks.root import FormFolder
from mlxd_shared.domain.errors import (
    FieldNotServed,
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    QueueFull,
)
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.security.callers import current_caller
from mlxd_shared.wire.convert import checked_duration_s, load_from_pb
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import write

DESCRIPTOR = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
UNLOAD_GRACE_MAX_S = 3600.0


class ModelService:
    """Implements the service over the catalog and the runtime."""

    def __init__(
        self,
        catalog: Catalog,
        runtime: Runtime,
        clock: Clock,
        *,
        keeper: Keeper | None = None,
        downloads: Downloads | None = None,
    ) -> None:
        self._catalog = catalog
        self._runtime = runtime
        self._clock = clock
        self._keeper = keeper
        self._downloads = downloads
        self._log_readers = 0

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Return a page of models, by name; a broken folder is listed with its error."""
        if not 0 <= request.page_size <= config.PAGE_SIZE_MAX:
            limit = f"{request.page_size} is outside [0, {config.PAGE_SIZE_MAX}]"
            raise InvalidRequest.of("page_size", limit)
        if len(request.page_token) > config.MODEL_NAME_CHARS_MAX:
            raise InvalidRequest.of("page_token", "was not given by an earlier page")
        size = request.page_size or config.PAGE_SIZE_DEFAULT
        refs = await self._catalog.store.list_models()
        first = bisect.bisect_right([ref.name for ref in refs], request.page_token)
        page = refs[first : first + size]
        more = first + size < len(refs)
        return model_pb2.ListModelsResponse(
            models=[self._to_message(ref) for ref in page],
            next_page_token=page[-1].name if more else "",
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Return one model."""
        ref = await self._catalog.find(request.model)
        return model_pb2.GetModelResponse(model=self._view(ref))

    async def LoadModel(
        self, request: model_pb2.LoadModelRequest, context: Context
    ) -> AsyncGenerator[model_pb2.LoadModelResponse, None]:
        """Load a model and report its progress, or only compute whether it would fit."""
        spec = load_from_pb(request.options)
        if request.cancel_on_disconnect:
            raise FieldNotServed("cancel_on_disconnect")
        is_folder = request.model.startswith("/")
        if is_folder:  # the caller may choose its name, so the key is checked against the path
            _check_key(request.model)
        ref = await self._catalog.find_to_load(
            request.model, name=request.name, keep=not request.validate_only
        )
        if not is_folder:
            _check_key(ref.name, request.model)
        await describe_for(ref.facts, spec)
        # Only a worker can check the rest for a model that mlx-lm implements.
        check_options(ref.facts, spec, exact=not ref.facts.caches.foreign)
        if request.validate_only:
            loaded = self._runtime.state.models.get(ref.digest)
            if loaded is not None and (problem := conflict(loaded, spec)) is not None:
                raise problem
            yield model_pb2.LoadModelResponse(fit=await self._fit(ref, spec), model=self._view(ref))
            return
        fit: types_pb2.FitReport | None = await self._fit(ref, spec)
        with self._catalog.keeping(ref), self._runtime.changes.subscribe(ref.digest) as news:
            async with self._runtime.loading(ref, spec) as answer:
                async for model in _until_ready(news, answer):
                    yield model_pb2.LoadModelResponse(model=self._view(ref, model), fit=fit)
                    fit = None
                if fit is not None:  # the model was ready already
                    yield model_pb2.LoadModelResponse(model=self._view(ref), fit=fit)

    async def UnloadModel(
        self, request: model_pb2.UnloadModelRequest, context: Context
    ) -> model_pb2.UnloadModelResponse:
        """Unload a model; answers once its process has ended. The model must be named."""
        if not request.model:
            raise InvalidRequest.of("model", "is required: nothing is unloaded unless it is named")
        grace_s = config.UNLOAD_GRACE_DEFAULT_S
        if request.HasField("grace"):
            grace_s = checked_duration_s(request.grace, "grace")
        if not 0 <= grace_s <= UNLOAD_GRACE_MAX_S:
            limit = f"{grace_s:g} s is outside [0, {UNLOAD_GRACE_MAX_S:g}]"
            raise InvalidRequest.of("grace", limit)
        ref = await self._catalog.find(request.model)
        _check_key(ref.name, request.model)
        aborted = await self._runtime.unload(ref.digest, grace_s=grace_s, force=request.force)
        return model_pb2.UnloadModelResponse(model=self._view(ref), streams_aborted=aborted)

    async def ForgetModel(
        self, request: model_pb2.ForgetModelRequest, context: Context
    ) -> model_pb2.ForgetModelResponse:
        """Forget a name that a load gave to a folder."""
        _check_key(request.name)
        return model_pb2.ForgetModelResponse(names=await self._catalog.forget(request.name))

    async def WatchModels(
        self, request: model_pb2.WatchModelsRequest, context: Context
    ) -> AsyncGenerator[model_pb2.WatchModelsResponse, None]:
        """Send every model once, then each change."""
        ref = await self._catalog.find(request.model) if request.model else None
        with self._runtime.changes.subscribe(None if ref is None else ref.digest) as news:
            refs = await self._catalog.store.list_models() if ref is None else (ref,)
            # All views are of the moment at which the news begins: a slow reader never goes back.
            views = [self._to_message(known) for known in refs]
            news.pending()
            for view in views:
                yield model_pb2.WatchModelsResponse(model=view)
            while True:
                model = await news.next()
                changed = self._catalog.store.find_known(model.digest)
                if changed is not None:
                    yield model_pb2.WatchModelsResponse(model=self._view(changed, model))

    async def ReadLogs(
        self, request: model_pb2.ReadLogsRequest, context: Context
    ) -> AsyncGenerator[model_pb2.ReadLogsResponse, None]:
        """Send what a model's worker has written and, with `follow`, what it goes on to write."""
        if not request.model:
            raise InvalidRequest.of("model", "is required: a log is one model's")
        tail = request.tail if request.HasField("tail") else config.LINES_KEPT_MAX
        if tail > config.LINES_KEPT_MAX:
            raise InvalidRequest.of("tail", f"{tail} is above {config.LINES_KEPT_MAX}")
        ref = await self._catalog.find(request.model)
        _check_key(ref.name, request.model)
        worker = _check_worker(ref, self._runtime.workers.last_of(ref.digest))
        if self._log_readers >= config.LOG_READERS_MAX:
            raise QueueFull("readers of logs", config.LOG_READERS_MAX)
        self._log_readers += 1
        try:
            async for piece in _read_output(worker, tail=tail, follow=request.follow):
                yield model_pb2.ReadLogsResponse(
                    lines=piece.lines,
                    missed_lines=piece.missed,
                    worker_incarnation=worker.incarnation,
                    pid=0 if worker.process is None else worker.process.pid,
                )
        finally:
            self._log_readers -= 1

    async def PullModel(
        self, request: model_pb2.PullModelRequest, context: Context
    ) -> AsyncGenerator[model_pb2.PullModelResponse, None]:
        """Download a model into the hub's cache and report its progress; who else asks joins in."""
        if self._downloads is None:
            raise InvalidRequest.of("model", "no cache to pull into: serve with --hub-cache")
        wanted = wanted_of(request.model, request.include, self._downloads.cache)
        _check_key(request.model, wanted.repository)
        key = current_caller.get().key
        caller = "" if key is None else key.name
        async with aclosing(self._downloads.follow(wanted, caller=caller)) as steps:
            async for step in steps:
                yield write(step, model_pb2.PullModelResponse)

    async def DropPrefixes(
        self, request: model_pb2.DropPrefixesRequest, context: Context
    ) -> model_pb2.DropPrefixesResponse:
        """Remove what is on disk of prompts. Nothing goes unless it is named, or all is."""
        keeper = _check_keeper(self._keeper, "model" if request.model else "all")
        if bool(request.model) == request.all:
            raise InvalidRequest.of("model", "name one, or all: nothing is dropped otherwise")
        names: frozenset[str] | None = None
        if request.model:
            name, digest = await self._find_kept(keeper, request.model)
            _check_key(name, request.model)
            # By its name also what other weights have left that were called so.
            names = frozenset({digest} if request.model == digest else {name, digest}) - {""}
        else:
            _check_key("*")  # no model's name: a key for some models alone is refused
        workers = self._runtime.workers
        dropped = await keeper.drop(names, workers.live())
        # Accounts are by the workers' word: whoever asks next sees what is left.
        await workers.refresh(workers.live(), wait_s=config.STATUS_POLL_S)
        return model_pb2.DropPrefixesResponse(blocks=dropped.blocks, bytes=dropped.nbytes)

    async def VerifyPrefixes(
        self, request: model_pb2.VerifyPrefixesRequest, context: Context
    ) -> AsyncGenerator[model_pb2.VerifyPrefixesResponse, None]:
        """Check every file on disk, and tell what was found, folder by folder."""
        _check_key("*")  # it reads, and tells of, all models: as above
        async with aclosing(_check_keeper(self._keeper, "prefix_disk").verify()) as checks:
            async for findings in checks:
                yield model_pb2.VerifyPrefixesResponse(
                    form=findings.form,
                    model=findings.about.model,
                    sound=findings.sound,
                    removed=sum(findings.refused.values()),
                    unread=findings.unread,
                    locked=findings.locked,
                )

    async def _find_kept(self, keeper: Keeper, model: str) -> tuple[str, str]:
        """Return name and digest of a model that is offered, or of which something is kept."""
        try:
            ref = await self._catalog.find(model)
        except ModelNotFound:
            for folder in self._accounts(keeper):
                if model in (folder.about.model, folder.about.digest):
                    return folder.about.model, folder.about.digest
            raise
        return ref.name, ref.digest

    def _accounts(self, keeper: Keeper) -> list[FormFolder]:
        return keeper.accounts(self._runtime.workers.live())

    # --- views -----------------------------------------------------------------------------------

    def _to_message(self, ref: ModelRef | BrokenRef) -> types_pb2.Model:
        return broken_to_pb(ref) if isinstance(ref, BrokenRef) else self._view(ref)

    def _view(self, ref: ModelRef, model: Model | None = None) -> types_pb2.Model:
        model = model or self._runtime.state.models.get(ref.digest)
        number = None if model is None else model.worker
        worker = None if number is None else self._runtime.workers.get(number)
        return model_to_pb(ref, model, worker, self._clock)

    async def _fit(self, ref: ModelRef, spec: LoadSpec) -> types_pb2.FitReport:
        try:
            return self._fit_now(ref, spec)
        except Undescribed as lacking:
            await lacking.division.describe()
            return self._fit_now(ref, spec)

    def _fit_now(self, ref: ModelRef, spec: LoadSpec) -> types_pb2.FitReport:
        self._runtime.measure()
        state = self._runtime.state
        if ref.digest not in state.models:
            spec = fill_in(spec, ref.configured)
        fit_report = report(state, ref.digest, ref.facts, spec)
        names = {model.digest: model.name for model in state.models.values()}
        return report_to_pb(fit_report, ref, names)


def _check_keeper(keeper: Keeper | None, field: str) -> Keeper:
    """Return what keeps prompts on disk; raises InvalidRequest where nothing does."""
    if keeper is None:
        raise InvalidRequest.of(field, "nothing is kept on disk: serve with --prefix-disk")
    return keeper


def _check_worker(ref: ModelRef, worker: Worker | None) -> Worker:
    """Return the worker whose output is the model's log.

    Raises:
        InvalidRequest: there is none, or its output is elsewhere.
        ModelLoading: it has only just been started.
    """
    if worker is None:
        raise InvalidRequest.of("model", f"{ref.name} has no worker, nor one that failed recently")
    if not worker.endable:
        problem = f"the worker of {ref.name} was started elsewhere, where its output is"
        raise InvalidRequest.of("model", problem)
    if worker.process is None and worker.failed_start is None:
        raise ModelLoading(ref.name, LOADING_RETRY_S, 0.0)
    return worker


async def _read_output(worker: Worker, *, tail: int, follow: bool) -> AsyncGenerator[Piece, None]:
    """Yield the last lines of a worker's output and, with `follow`, further ones until its end."""
    if worker.process is None:  # it never listened: these lines are all there is
        lines = worker.last_lines()[-tail:] if tail else ()
        yield Piece(lines, len(lines), missed=0)
        return
    output = worker.process.output
    end = output.end
    number = max(output.begin, end - tail)
    while number < end or (follow and await output.wait(number)):
        end = output.end if follow else end
        piece = output.read(number, end=end, nbytes_max=config.LOG_MESSAGE_BYTES_MAX)
        number = piece.end
        yield piece


def _check_key(*names: str) -> None:
    """Refuse models that the caller's key, if it has one, is not for; see `Key.check_model`."""
    key = current_caller.get().key
    if key is not None:
        key.check_model(*names)


async def _until_ready(
    news: Subscription, answer: asyncio.Future[Lease | actions.Done]
) -> AsyncGenerator[Model, None]:
    """Yield a model's changes until it is ready; raise the reason if it fails.

    An immediate refusal raises before anything is yielded. Changes after READY are not yielded.
    """
    last: Model | None = None
    while not answer.done():
        step = asyncio.ensure_future(news.next())
        waiting: set[asyncio.Future[Any]] = {step, answer}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            step.cancel()
        has_failed = answer.done() and answer.exception() is not None
        if step.done() and not step.cancelled() and not has_failed:
            last = step.result()
            yield last
    answer.result()
    if last is not None and isinstance(last.phase, Ready):
        return
    for model in news.pending():
        yield model
        if isinstance(model.phase, Ready):
            return
