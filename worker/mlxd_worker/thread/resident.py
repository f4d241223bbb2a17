"""Make one model resident: files to weights, caches, a warm engine, and the facts about them.

Invariants:
- Runs on the engine thread, which is the only one to import MLX.
- Everything about the request that can be refused is refused before the first weight is read.
- Nothing is pinned in the ledger unless the load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import mlx.core as mx

from mlxd_models.describe import Description
from mlxd_models.families.common.family import Footprint
from mlxd_models.files.chat_template import ChatTemplate, read_template
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.model_source import files_of
from mlxd_models.fit.described import Life, facts_of, life_of
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.options import check_options
from mlxd_models.fit.plan import (
    ACTIVATIONS_TERM,
    KV_TERM,
    POOL_TERM,
    WEIGHTS_TERM,
    Device,
    Plan,
)
from mlxd_models.fit.planner import plan_load
from mlxd_models.fit.shares import check_divides, rank_description
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared import config
from mlxd_shared.config import SPECULATION_DEPTH_DEFAULT
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, MlxdError
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import DEFAULTS, LoadSpec, merge
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.changes import LIFTED_NBYTES
from mlxd_worker.cache.prefix.lookup import PrefixCounts
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.constraints.compiler import NO_CONTROLS, Constraints
from mlxd_worker.engine.first_streams import run_first_streams
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import Submit
from mlxd_worker.engine.speculation.speculator import SpeculationCounts
from mlxd_worker.engine.stepping.base import Stepper
from mlxd_worker.engine.stepping.choose import choose, compile_steps, writes_in_place
from mlxd_worker.engine.text import TextDecoder
from mlxd_worker.engine.warm_up import warm_shapes
from mlxd_worker.kernels.products import own_nbytes_max
from mlxd_worker.machine.cores import available_cores
from mlxd_worker.machine.launching import captures_products, choose_launching
from mlxd_worker.models.base import Model, Passes, Sighted
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.weights.reader import Progress
from mlxd_worker.models.weights.shards import Share
from mlxd_worker.text.pooling_files import read_embed_defaults
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.thread.blocks import open_blocks
from mlxd_worker.thread.facts import DiskFolder, Loaded, LoadJob, Report
from mlxd_worker.thread.readings import LOCAL, Readings
from mlxd_worker.tokenizing.files import load_tokenizer
from mlxd_worker.vision.sight import Sight, check_placeholder, read_sight

_log = get_logger("load")


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model with its caches and engine. One owner: the engine thread."""

    model: Model
    caches: RowCaches
    prefix: PrefixCache
    engine: Engine
    facts: Loaded
    gallery: Gallery | None = None
    """What sees images; None: the model reads text alone."""


def make_resident(
    job: LoadJob,
    *,
    device: DeviceKind,
    report: Report,
    counts: PrefixCounts | None = None,
    guesses: SpeculationCounts | None = None,
    folder: DiskFolder | None = None,
    share: Share | None = None,
    readings: Readings = LOCAL,
) -> Resident:
    """Load and warm up the model of `job`; `report` gets every step.

    MLX's memory and pool are limited from then on, even after a failure: the caller lifts that.
    counts: of look-ups, and of guesses. folder: for blocks. share: what this rank has; None: all.

    Raises:
        InvalidModel: the folder cannot be served; names the file and the field.
        InvalidRequest: this model cannot honour an option; names it and the limit.
    """
    report(LoadProgress("starting"))
    files = inspect_model(stored := files_of(job.path))
    own = _part_of(files, job.spec, share)
    check_options(model_facts := facts_of(own), replace(job.spec, ranks=None))
    tokenizer, template = load_tokenizer(stored), read_template(stored)
    sight = read_sight(stored, files.footprint.sight)
    sampling = merge(job.spec.sampling, read_generation_defaults(stored), DEFAULTS)
    plan = _plan(job.spec, model_facts, device, readings)
    life = life_of(plan, files, on_cpu=device is DeviceKind.CPU)
    read_nbytes = 0

    def progress(bytes_read: int, bytes_total: int) -> None:
        nonlocal read_nbytes
        read_nbytes = bytes_total
        report(LoadProgress("reading weights", bytes_read, bytes_total))

    _prepare_mlx(plan, own.footprint, life, device, share)
    model = _read_model(files, life, plan, progress, share)
    caches = _new_caches(model, plan, in_place=writes_in_place(model, device))
    passes: Passes = (compiled := compile_steps(model, caches, device)) or model
    chat = _read_chats(template, tokenizer, plan, sight)
    facts = Loaded(
        job=job,
        tokenizer=tokenizer,
        constraints=_make_constraints(tokenizer, model, chat),
        chat=chat,
        vocab_size=model.vocab_size,
        context_length=plan.context_length,
        context_length_max=model.context_max,
        rows_max=plan.rows_max,
        weights=life.weights,
        kv_format=plan.kv_format,
        prefix_cache_nbytes=plan.prefix_bytes,
        sampling=sampling,
        embeds=model.capabilities.embeds,
        embedding=read_embed_defaults(stored),
        sight=sight,
        unseeing=files.unseeing,
    )
    make_engine = _engine_maker(passes, caches, facts, plan, readings)
    report(LoadProgress("warming up", read_nbytes, read_nbytes))
    _check_generates(make_engine(stepper=choose(passes, caches, clock=readings.now_s)), life.form)
    warm_shapes(model, caches, compiled=compiled)
    caches.rest()
    gallery = open_gallery(model, sight, device)
    report(LoadProgress("ready", read_nbytes, read_nbytes))
    stepper = _choose(passes, caches, readings, guesses)
    prefix = _new_prefix(job, plan, life, caches, device, counts=counts, folder=folder)
    engine = make_engine(prefix=prefix, stepper=stepper, gallery=gallery)
    return Resident(model, caches, prefix, engine, facts, gallery)


def _choose(
    passes: Passes, caches: RowCaches, readings: Readings, guesses: SpeculationCounts | None
) -> Stepper:
    """Return what steps the rows, guessing where that pays."""
    depth = SPECULATION_DEPTH_DEFAULT
    return choose(passes, caches, clock=readings.now_s, depth_default=depth, counts=guesses)


def _read_model(
    files: Description, life: Life, plan: Plan, progress: Progress, share: Share | None
) -> Model:
    return load_model(
        files,
        form=life.form,
        progress=progress,
        packed=life.packed,
        on_load=life.on_load,
        context=plan.context_length,
        share=share,
    )


def _part_of(files: Description, spec: LoadSpec, share: Share | None) -> Description:
    """Return the description of what is loaded here; raises where it cannot be divided so."""
    ranks = 1 if share is None else share.ranks
    if spec.ranks not in (None, ranks):
        raise InvalidRequest.of("options.ranks", f"{spec.ranks}: this worker has {ranks}")
    if share is None:
        return files
    check_divides(files, spec, share.ranks)
    return rank_description(files, share.ranks)


def open_gallery(model: Model, sight: Sight | None, device: DeviceKind) -> Gallery | None:
    """Return what sees images, warm; None where the model reads text alone.

    On a CPU there are no kernels to compile, and a tower may take many seconds: nothing is seen.

    Raises:
        InvalidModel: the model cannot see.
    """
    if sight is None:
        return None
    assert isinstance(model, Sighted), "its description says so"
    on_cpu = device is DeviceKind.CPU
    gallery = Gallery(model, sight.sizes, sight.settings, on_cpu=on_cpu)
    if not on_cpu:
        try:
            gallery.warm_up()
        except (RuntimeError, ValueError) as error:  # MLX's own
            raise InvalidModel(f"cannot see a blank image: {error}") from error
    return gallery


def _new_prefix(
    job: LoadJob,
    plan: Plan,
    life: Life,
    caches: RowCaches,
    device: DeviceKind,
    *,
    counts: PrefixCounts | None,
    folder: DiskFolder | None,
) -> PrefixCache:
    """Return the prefix cache, with blocks in `folder` if any; the caller closes its `disk`."""
    disk = None
    if folder is not None and plan.prefix_bytes:
        disk = open_blocks(
            folder,
            caches,
            name=job.name,
            digest=job.digest,
            weights=f"{life.weights} {life.form} {life.packed}",
            context_length=plan.context_length,
            device=device,
            library=f"mlx {version('mlx')}",
        )
    return PrefixCache(caches, budget_nbytes=plan.prefix_bytes, counts=counts, disk=disk)


def _read_chats(
    template: ChatTemplate | None, tokenizer: Tokenizer, plan: Plan, sight: Sight | None
) -> ChatFormat | None:
    """Return how conversations are read; None where the model has no template for them."""
    if template is None:
        return None
    chars_max = tokenizer.chars_max(plan.context_length)
    image = None if sight is None else sight.sizes.around
    chat = ChatFormat(
        template, tokenizer, chars_max=chars_max, sees=sight is not None, image_ids=image
    )
    if sight is not None:
        check_placeholder(sight, chat.control.ids.values())
    return chat


def _make_constraints(tokenizer: Tokenizer, model: Model, chat: ChatFormat | None) -> Constraints:
    """Return what compiles the model's formats, and its calls where it chats."""
    controls = NO_CONTROLS if chat is None else chat.control.ids
    return Constraints(tokenizer, model.vocab_size, controls)


def _new_caches(model: Model, plan: Plan, *, in_place: bool) -> RowCaches:
    context = plan.context_length
    layers = model.new_caches(kv=plan.kv_format, context_max=context)
    # What is lifted comes on top of all rows, as activations do, and never together with them.
    lifted_nbytes = min(LIFTED_NBYTES, plan.nbytes_of(ACTIVATIONS_TERM) // 8)
    return RowCaches(
        layers,
        context_max=context,
        rows_max=plan.rows_max,
        keeps_spares=True,
        lifted_nbytes=lifted_nbytes,
        in_place=in_place,
    )


def _prepare_mlx(
    plan: Plan, footprint: Footprint, life: Life, device: DeviceKind, share: Share | None
) -> None:
    """Hold MLX to the plan: how it launches, its pool's size, and how far it evaluates ahead."""
    if device is DeviceKind.CUDA and share is None:  # over ranks it was never measured
        captures = captures_products(footprint, life, own_nbytes_max=own_nbytes_max())
        choose_launching(
            os.environ,
            weights_nbytes=plan.nbytes_of(WEIGHTS_TERM),
            rows_max=plan.rows_max,
            captures=captures,
        )
    pool_nbytes = plan.nbytes_of(POOL_TERM)
    mx.set_cache_limit(pool_nbytes)
    if device is DeviceKind.CPU:
        beyond_nbytes = footprint.passes.beyond_nbytes(
            footprint.caches, context=plan.context_length, item_nbytes=life.form.nbytes
        )
        # Up to this it evaluates ahead; then it waits for what it has begun.
        mx.set_memory_limit(plan.arrays_bytes - pool_nbytes - beyond_nbytes)


def _engine_maker(
    model: Passes,
    caches: RowCaches,
    facts: Loaded,
    plan: Plan,
    readings: Readings,
) -> Callable[..., Engine]:
    """Return a function that makes an engine, given `Engine`'s keyword arguments."""
    limits = Limits(
        context_length=facts.context_length,
        rows_max=facts.rows_max,
        kv_nbytes_max=plan.nbytes_of(KV_TERM),
        mask_threads=min(available_cores(), config.CONSTRAINT_THREADS_MAX),
    )

    def decoder(request: Submit) -> TextDecoder:
        return facts.tokenizer.detokenizer(
            skip_special=request.skip_special_tokens,
            anchored=request.anchored,
            shown=request.shown,
        )

    return partial(
        Engine,
        model,
        caches,
        decoder,
        limits,
        clock=readings.now_s,
        make_masks=readings.make_masks,
    )


def _check_generates(engine: Engine, form: FloatType) -> None:
    """Warm up with an engine that keeps no prompts, and refuse a model that cannot generate."""
    try:
        run_first_streams(engine)
    except MlxdError as error:
        problem = f"cannot generate with weights as {form}: {error.describe()}"
        raise InvalidModel(problem) from error


def _plan(spec: LoadSpec, facts: ModelFacts, kind: DeviceKind, readings: Readings) -> Plan:
    """Return the plan for `spec`; what it leaves open is chosen so that the model fits."""
    available_nbytes = readings.available_nbytes(kind)
    budget_nbytes = int(available_nbytes * (1 - config.MEMORY_RESERVE_FRACTION))
    device = Device(
        name=kind.first_name,
        kind=kind,
        total_bytes=available_nbytes,
        reserve_bytes=available_nbytes - budget_nbytes,
        budget_bytes=budget_nbytes,
        usable_bytes=budget_nbytes,
        holds_process=True,
    )
    plan = plan_load(facts, spec, device)
    fits = plan.need_bytes <= budget_nbytes
    log = _log.info if fits else _log.warning
    log(
        "residency",
        weights=plan.weights.value,
        context_length=plan.context_length,
        kv_format=plan.kv_format.value,
        prefix_cache_nbytes=plan.prefix_bytes,
        fits=fits,
        total_nbytes=plan.need_bytes,
        budget_nbytes=budget_nbytes,
    )
    return plan
