"""Messages that the fake server sends: short ways to write a stream, a model, a fit, a status."""

from __future__ import annotations

from typing import Any

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, types_pb2
from mlxd_shared.wire.records import duration_to_pb, timestamp_to_pb

DIGEST = "sha256:" + "0123456789abcdef" * 4
NOON = 1_750_000_000.0
MIB = 1 << 20


def delta(offset: int, text: str, *token_ids: int) -> inference_pb2.GenerateResponse:
    """A message in the middle of a stream."""
    return inference_pb2.GenerateResponse(offset=offset, text=text, token_ids=token_ids)


def logprob(token_id: int, value: float, text: bytes) -> inference_pb2.TokenLogprob:
    """A token's log-probability; choose `value` such that a float holds it."""
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=value, text_bytes=text)


def last(
    offset: int,
    *,
    text: str = "",
    token_ids: tuple[int, ...] = (),
    finish: types_pb2.Finish | None = None,
) -> inference_pb2.GenerateResponse:
    """The last message of a stream, by default one that reached max_tokens."""
    done = offset + len(token_ids)
    return inference_pb2.GenerateResponse(
        offset=offset,
        text=text,
        token_ids=token_ids,
        finish=finish or types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH),
        usage=types_pb2.Usage(
            prompt_tokens=5,
            cached_tokens=2,
            cache_reason=types_pb2.CACHE_REASON_DIVERGED,
            completion_tokens=done,
            total_tokens=5 + done,
            queue_duration=duration_to_pb(0.001),
            load_duration=duration_to_pb(0.25),
            prompt_duration=duration_to_pb(0.01),
            completion_duration=duration_to_pb(0.5),
            seed=(1 << 64) - 1,
        ),
    )


def story() -> list[inference_pb2.GenerateResponse]:
    """A whole stream of four tokens; the first message names request and model."""
    first = delta(0, "Once", 1)
    first.request_id, first.model_digest = "r-1", DIGEST
    return [first, delta(1, " upon", 2, 3), last(3, text=" ä\n", token_ids=(4,))]


def model(
    name: str = "demo", *, state: str = "READY", error: str = "", priority: int = 0
) -> types_pb2.Model:
    """A model in `state`."""
    loaded = state not in {"UNLOADED", "FAILED"}
    return types_pb2.Model(
        name=name,
        aliases=["tiny"] if name == "demo" else [],
        digest=DIGEST,
        path=f"/models/{name}",
        architecture="LlamaForCausalLM",
        state=types_pb2.ModelState.Value(f"MODEL_STATE_{state}"),
        progress=types_pb2.LoadProgress(bytes_read=4 * MIB, bytes_total=8 * MIB, stage=state),
        error=error,
        context_length_max=1024,
        context_length=512 if loaded else 0,
        vocab_size=4096,
        stored_bytes=8 * MIB,
        resident_bytes=12 * MIB if loaded else 0,
        device="cpu" if loaded else "",
        weights=types_pb2.WEIGHTS_FORMAT_FLOAT32,
        rows_max=4,
        effective_sampling=types_pb2.SamplingOptions(temperature=0.5, top_k=40),
        streams_active=1 if loaded else 0,
        pinned=False,
        priority=priority,
        last_used_time=timestamp_to_pb(NOON),
        worker_incarnation="w-1" if loaded else "",
        kv_format=types_pb2.KV_FORMAT_Q8 if loaded else types_pb2.KV_FORMAT_UNSPECIFIED,
        prefix_cache_bytes=3 * MIB if loaded else 0,
        prefix_reload=duration_to_pb(1.5 if loaded else 0.0),
    )


def load_steps(name: str = "demo") -> list[model_pb2.LoadModelResponse]:
    """A load from its fit to READY."""
    return [
        model_pb2.LoadModelResponse(model=model(name, state="LOADING"), fit=fit(name)),
        model_pb2.LoadModelResponse(model=model(name, state="LOADING")),
        model_pb2.LoadModelResponse(model=model(name)),
    ]


def pull_steps(name: str = "o/m@v1") -> list[model_pb2.PullModelResponse]:
    """A pull of one file that is checked, from the hub's listing to the result."""
    kind = model_pb2.PullModelResponse
    file: dict[str, Any] = {
        "file": "model.safetensors",
        "file_digest": f"sha256:{'ab' * 32}",
        "file_size_bytes": 2 * MIB,
        "total_bytes": 3 * MIB,
    }
    repository, _, revision = name.partition("@")
    pulled = model_pb2.PulledModel(
        name=name,
        repository=repository,
        revision=revision or "main",
        commit="1" * 10 + "a" * 30,
        path="/hub/snapshots/1",
        digest="d1",
        files=2,
        bytes=3 * MIB,
    )
    return [
        kind(phase=kind.PHASE_LISTING),
        kind(phase=kind.PHASE_DOWNLOADING, done_bytes=2 * MIB, file_done_bytes=MIB, **file),
        kind(phase=kind.PHASE_VERIFYING, done_bytes=3 * MIB, file_done_bytes=2 * MIB, **file),
        kind(phase=kind.PHASE_DONE, done_bytes=3 * MIB, total_bytes=3 * MIB, pulled=pulled),
    ]


def fit(
    name: str = "demo", *, now: bool = True, ever: bool = True, evict: tuple[str, ...] = ()
) -> types_pb2.FitReport:
    """A report of 11 MiB in two terms."""
    return types_pb2.FitReport(
        model=name,
        model_digest=DIGEST,
        fits_now=now,
        fits_ever=ever,
        terms=[
            types_pb2.FitTerm(name="weights", bytes=10 * MIB, note="float32 of 8-bit"),
            types_pb2.FitTerm(name="kv", bytes=MIB, note="4 rows of 512 tokens"),
        ],
        need_bytes=11 * MIB,
        budget_bytes=100 * MIB,
        available_bytes=50 * MIB,
        reserve_bytes=20 * MIB,
        device="cpu",
        weights=types_pb2.WEIGHTS_FORMAT_FLOAT32,
        context_length=512,
        rows_max=4,
        would_evict=evict,
        absences=[
            types_pb2.Absence(model=name, reload=duration_to_pb(2.0), prompts=duration_to_pb(0.5))
            for name in evict
        ],
        suggestions=[] if ever else ["a context of 64 tokens"],
        kv_format=types_pb2.KV_FORMAT_Q8,
        prefix_cache_bytes=3 * MIB,
    )


def status() -> status_pb2.Status:
    """A controller with one worker that holds 12 MiB, and one that has died."""
    return status_pb2.Status(
        role=status_pb2.PROCESS_ROLE_CONTROLLER,
        version="9.8.7",
        pid=4242,
        start_time=timestamp_to_pb(NOON),
        now=timestamp_to_pb(NOON + 90),
        host_memory=status_pb2.HostMemory(
            total_bytes=1 << 33, available_bytes=1 << 32, resident_bytes=70 * MIB
        ),
        devices=[
            status_pb2.DeviceStatus(
                name="cpu", kind="cpu", total_bytes=1 << 33, budget_bytes=1 << 32,
                reserved_bytes=12 * MIB,
            )
        ],
        workers=[worker(), worker(exit_code=-9, last_lines=["going down"])],
        metrics=[
            status_pb2.MetricFamily(
                name="mlxd_ttft_seconds",
                help="Time to first token.",
                kind=status_pb2.METRIC_KIND_HISTOGRAM,
                points=[
                    status_pb2.MetricPoint(
                        labels={"model": "demo"},
                        histogram=status_pb2.Histogram(bounds=[0.1, 1], counts=[3, 2, 1], sum=4.5),
                    )
                ],
            )
        ],
    )  # fmt: skip


def worker(
    *, exit_code: int | None = None, last_lines: list[str] | None = None
) -> status_pb2.WorkerStatus:
    """A worker of demo."""
    return status_pb2.WorkerStatus(
        pid=4343,
        address="unix:/run/w",
        incarnation="w-1",
        model_name="demo",
        model_path="/models/demo",
        model_digest=DIGEST,
        state=types_pb2.MODEL_STATE_READY,
        context_length=512,
        context_length_max=1024,
        vocab_size=4096,
        rows_max=4,
        memory=status_pb2.WorkerMemory(
            accounts=[status_pb2.MemoryAccount(name="weights", bytes=12 * MIB, arrays=9)],
            total_bytes=12 * MIB,
            mlx_active_bytes=12 * MIB,
            unaccounted_bytes=-64,
            devices=[status_pb2.DeviceMemory(device="cpu", bytes=12 * MIB)],
            resident_bytes=60 * MIB,
        ),
        figures_age=duration_to_pb(0.5),
        exit_code=exit_code,
        last_lines=last_lines,
        streams_running=1,
        oldest_wait=duration_to_pb(0),
        backend="cpu",
        mlx_version="0.32.4",
        math_library=status_pb2.MathLibrary(
            name="OpenBLAS", version="0.3.30", threads=2, reason="from the scipy-openblas32 package"
        ),
        weights=types_pb2.WEIGHTS_FORMAT_FLOAT32,
        kv_format=types_pb2.KV_FORMAT_Q8,
        prefix_cache_bytes=3 * MIB,
        cpu_seconds=1.5,
        start_time=timestamp_to_pb(NOON),
    )
