"""A status as metric families: parsed back by Prometheus' own parsers."""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client.parser import text_string_to_metric_families

from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.metrics.exposition import families, render
from mlxd_controller.services.gauges import families_to_pb
from mlxd_shared.ops.metrics import Counter, Histogram
from mlxd_shared.wire.convert_status import counter_to_pb, histogram_to_pb

NASTY = 'na"me\\with\nall, {of} it=ü'
Samples: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ALIASES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
}


def a_worker(**changes: object) -> status_pb2.WorkerStatus:
    """A worker that serves."""
    worker = status_pb2.WorkerStatus(
        pid=7,
        incarnation="a-1",
        model_name="demo",
        model_digest="d" * 8,
        state=types_pb2.MODEL_STATE_READY,
        streams_running=2,
        streams_waiting=3,
        kv_tokens_used=25,
        kv_tokens_capacity=100,
        cpu_seconds=1.5,
        address="unix:/w",
        backend="cpu",
        mlx_version="0.1",
        math_library=status_pb2.MathLibrary(name="blas"),
        weights=types_pb2.WEIGHTS_FORMAT_BFLOAT16,
        start_time=Timestamp(seconds=1000, nanos=500_000_000),
        memory=status_pb2.WorkerMemory(
            accounts=[
                status_pb2.MemoryAccount(name="weights", bytes=10),
                status_pb2.MemoryAccount(name="kv", bytes=20),
            ],
            devices=[status_pb2.DeviceMemory(device=name) for name in ("a", "b")],
            mlx_peak_bytes=99,
            unaccounted_bytes=-4,
        ),
    )
    worker.MergeFrom(status_pb2.WorkerStatus(**changes))  # type: ignore[arg-type]
    return worker


def a_status(*workers: status_pb2.WorkerStatus) -> status_pb2.Status:
    """A controller's status with a counter and a histogram."""
    requests = Counter("mlxd_requests_total", "Requests.")
    requests.add(3, model="demo", code="OK")
    requests.add(1, model=NASTY, code="OK")
    seconds = Histogram("mlxd_queue_time_seconds", "Waits.", bounds=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        seconds.observe(value, model="demo")
    return status_pb2.Status(
        role=status_pb2.PROCESS_ROLE_CONTROLLER,
        version="1.2.3",
        start_time=Timestamp(seconds=900),
        host_memory=status_pb2.HostMemory(total_bytes=1 << 40, available_bytes=3),
        machines=[
            status_pb2.HostMemory(machine="a", total_bytes=1 << 40),
            status_pb2.HostMemory(machine="b", total_bytes=7, lost=True),
        ],
        devices=[status_pb2.DeviceStatus(name="cpu", kind="cpu", budget_bytes=5)],
        workers=workers,
        metrics=[counter_to_pb(requests), histogram_to_pb(seconds)],
    )


def plain(status: status_pb2.Status, *, vllm_aliases: bool = False) -> Samples:
    """What a scrape reads: every sample by name and labels; each once."""
    text = render(status, vllm_aliases=vllm_aliases).decode()
    flat = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(flat) == len(dict(flat))
    return dict(flat)


def test_counters_and_histograms_keep_their_names_and_values() -> None:
    """Buckets become cumulative with +Inf last; a bound belongs to its bucket."""
    samples = plain(a_status())
    demo = ("model", "demo")

    assert samples["mlxd_requests_total", (("code", "OK"), demo)] == 3
    assert samples["mlxd_requests_total", (("code", "OK"), ("model", NASTY))] == 1
    buckets = [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    for le, count in buckets:
        assert samples["mlxd_queue_time_seconds_bucket", (("le", le), demo)] == count
    assert samples["mlxd_queue_time_seconds_count", (demo,)] == 4
    assert math.isclose(samples["mlxd_queue_time_seconds_sum", (demo,)], 7.65)


def test_fields_become_gauges_in_base_units() -> None:
    """Process, host, device and worker are all there, in bytes and seconds since 1970."""
    samples = plain(a_status(a_worker()))
    labels = (("model", "demo"), ("worker", "a-1"))

    assert samples["mlxd_build_info", (("role", "controller"), ("version", "1.2.3"))] == 1
    assert samples["mlxd_start_time_seconds", ()] == 900
    assert samples["mlxd_host_memory_total_bytes", ()] == 1 << 40
    assert samples["mlxd_machine_up", (("machine", "a"),)] == 1
    assert samples["mlxd_machine_up", (("machine", "b"),)] == 0
    assert samples["mlxd_machine_memory_total_bytes", (("machine", "b"),)] == 7
    assert samples["mlxd_device_memory_budget_bytes", (("device", "cpu"), ("kind", "cpu"))] == 5
    assert samples["mlxd_worker_up", labels] == 1
    facts = {
        "digest": "d" * 8, "address": "unix:/w", "backend": "cpu", "device": "a,b",
        "mlx_version": "0.1", "math_library": "blas", "weights": "bfloat16",
    }  # fmt: skip
    info = tuple(sorted({**dict(labels), **facts}.items()))
    assert samples["mlxd_worker_info", info] == 1
    assert samples["mlxd_worker_start_time_seconds", labels] == 1000.5
    assert samples["mlxd_worker_cpu_seconds_total", labels] == 1.5
    assert samples["mlxd_worker_memory_peak_bytes", labels] == 99
    assert samples["mlxd_worker_unaccounted_bytes", labels] == -4
    assert samples["mlxd_worker_memory_bytes", (("account", "kv"), *labels)] == 20


def test_every_name_is_ours_and_in_base_units() -> None:
    """The prefix is mlxd_; counters end in _total; sizes say bytes, times say seconds."""
    for family in families(a_status(a_worker()), vllm_aliases=False):
        assert family.name.startswith("mlxd_")
        assert family.documentation
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample
            assert not sample.name.endswith(("_ms", "_mib", "_percent", "_mb")), sample


def test_the_aliases_are_five_behind_a_flag() -> None:
    """Each worker that is ready answers under the names that routers ask for."""
    status = a_status(
        a_worker(),
        a_worker(incarnation="b-2", model_name="other"),
        a_worker(incarnation="c-3", model_name="new", state=types_pb2.MODEL_STATE_LOADING),
    )
    without, samples = plain(status), plain(status, vllm_aliases=True)
    names = [name for name, _ in samples if name.startswith("vllm:")]
    labels = (("model_name", "demo"), ("worker", "a-1"))

    assert {name for name, _ in without if name.startswith("vllm:")} == set()
    assert set(names) == ALIASES
    assert len(names) == 2 * len(ALIASES)
    assert samples["vllm:num_requests_running", labels] == 2
    assert samples["vllm:num_requests_waiting", labels] == 3
    assert samples["vllm:kv_cache_usage_perc", labels] == 0.25
    blocks = (("block_size", "1"), ("model_name", "demo"), ("num_gpu_blocks", "100"), labels[1])
    assert samples["vllm:cache_config_info", blocks] == 1


@pytest.mark.parametrize("how", ["code", "state"])
def test_a_dead_worker_shows_its_end_and_nothing_else(how: str) -> None:
    """Its last figures are history; that it is down, and why, is news."""
    dead = a_worker(incarnation="a-0", state=types_pb2.MODEL_STATE_FAILED)
    if how == "code":
        dead.exit_code = -9
    samples = plain(a_status(dead, a_worker()), vllm_aliases=True)
    gone = ("worker", "a-0")
    of_dead = {name: value for (name, labels), value in samples.items() if gone in labels}

    assert of_dead == {"mlxd_worker_up": 0} | (
        {"mlxd_worker_exit_code": -9} if how == "code" else {}
    )


def test_a_label_set_is_unique_whatever_comes() -> None:
    """The same worker or point twice is one series, the later one."""
    status = a_status(a_worker(), a_worker(cpu_seconds=9.0))
    status.metrics[0].points.append(status.metrics[0].points[0])

    assert (
        plain(status)["mlxd_worker_cpu_seconds_total", (("model", "demo"), ("worker", "a-1"))] == 9
    )


def test_an_empty_status_renders() -> None:
    """A controller that has just begun has families without samples."""
    empty = status_pb2.Status(metrics=families_to_pb(Metrics()))
    assert plain(empty)["mlxd_start_time_seconds", ()] == 0
