"""When there are traces, whose children spans are, and that they cost nothing otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.tracing import ENDPOINTS, Complaints, Tracer, tracer_of, wants_traces
from tests.support.traces import Kept, id_of, parent_of, trace_id_of

ENDPOINT = {ENDPOINTS[0]: "http://127.0.0.1:4317"}
TRACE, SPAN = "1" * 32, "2" * 16
CALLER = (("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a=b"), ("x-other", "c"))


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        (ENDPOINT, True),
        ({ENDPOINTS[1]: "http://127.0.0.1:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
    ],
)
def test_traces_are_asked_for_by_the_standard_variables(
    environment: dict[str, str], wanted: bool
) -> None:
    """An endpoint or the exporter's name asks for them, and either switch turns them off."""
    assert wants_traces(environment) is wanted
    assert wanted or tracer_of("mlxd-test", environment) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_what_is_not_there_is_refused_by_its_variable(name: str, text: str) -> None:
    """No trace goes missing in silence."""
    with pytest.raises(InvalidRequest) as caught:
        wants_traces(ENDPOINT | {name: text})

    assert caught.value.violations[0].field == name


def test_a_span_is_the_child_of_its_caller_s() -> None:
    """The caller's trace and state go on; what is made for the span's request is its child."""
    kept = Kept()
    span = kept.tracer.begin("outer", CALLER)
    inner = kept.tracer.begin("inner", span.headers)
    span.add_phase("phase", 3.0, 1.0)
    inner.end(problem="bad")
    span.end()
    phase, failed, outer = kept.spans

    assert {trace_id_of(each) for each in kept.spans} == {TRACE}
    assert [parent_of(each) for each in (outer, failed, phase)] == [
        SPAN,
        id_of(outer),
        id_of(outer),
    ]
    assert dict(span.headers)["tracestate"] == "a=b"
    assert (failed.status.is_ok, failed.status.description) == (False, "bad")
    assert phase.start_time is not None
    assert phase.end_time is not None
    assert phase.end_time - phase.start_time == 2_000_000_000


@pytest.mark.parametrize("sent", [(), (("traceparent", "00-zz-1"),), (("tracestate", "a=b"),)])
def test_what_names_no_caller_begins_a_trace(sent: tuple[tuple[str, str], ...]) -> None:
    """A malformed head is no parent."""
    kept = Kept()
    kept.tracer.begin("outer", sent).end()

    assert parent_of(kept.spans[0]) == ""


def test_a_collector_that_never_answers_keeps_no_process_from_ending() -> None:
    """What is left is given up after its time."""
    never, ended = threading.Event(), threading.Event()

    class Stuck:
        def get_tracer(self, name: str) -> object:
            return object()

        def shutdown(self) -> None:
            never.wait()
            ended.set()

    stuck: Any = Stuck()
    Tracer(stuck).close(flush_s=0.01)

    assert not ended.is_set()
    never.set()
    assert ended.wait(60.0)


def test_a_collector_that_is_down_is_not_waited_for() -> None:
    """Its first refusal ends the wait for it; the SDK is still trying again then."""
    ran = run(
        "import threading\n"
        "from mlxd_shared.ops.tracing import FLUSH_THREAD\n"
        "tracer = tracer_of('mlxd-test', os.environ)\n"
        "tracer.begin('one', ()).end()\n"
        "tracer.close(flush_s=600.0)\n"
        "print('flushing:', FLUSH_THREAD in [each.name for each in threading.enumerate()])\n"
        "os._exit(0)\n",
        OTEL_EXPORTER_OTLP_TIMEOUT="900",
        PYTHONUNBUFFERED="1",
    )
    assert ran.returncode == 0, ran.stderr
    assert "flushing: True" in ran.stdout, "it is waited for"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that wants traces, to a port where nobody listens."""
    environment = dict(os.environ) | {ENDPOINTS[1]: "http://127.0.0.1:1"} | variables
    return subprocess.run(
        [sys.executable, "-c", f"import os\nfrom mlxd_shared.ops.tracing import tracer_of\n{code}"],
        env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip


def test_a_collector_that_is_down_is_said_once_a_minute() -> None:
    """The SDK's own lines, one a second, reach neither the terminal nor anybody else's handlers."""
    ran = run(
        "import logging\n"
        "tracer_of('mlxd-test', os.environ)\n"
        "for number in range(100):\n"
        "    logging.getLogger('opentelemetry.exporter.otlp').warning('no %d', number)\n"
    )
    lines = (ran.stdout + ran.stderr).splitlines()
    assert len(lines) == 1, lines
    assert "tracing fails" in lines[0]
    assert "no 0" in lines[0]


def test_complaints_are_counted_and_show_no_setting() -> None:
    """A line tells how many came since the last; what is said of variables comes without values."""
    now_s = [0.0]
    complaints = Complaints(now_s=lambda: now_s[0])

    def complain(name: str, text: str, *values: object) -> None:
        complaints.handle(logging.LogRecord(name, logging.WARNING, "", 0, text, values, None))

    with capture_logs() as lines:
        complain("opentelemetry.util.re", "bad header: %s", "x=secret")
        for now_s[0] in (1.0, 59.9, 60.0):
            complain("opentelemetry.exporter.otlp", "%s is away", "a:1")
    assert [(line["count"], line["problem"]) for line in lines] == [
        (1, "bad header: %s"), (3, "a:1 is away"),
    ]  # fmt: skip


def test_without_the_extra_the_variable_says_what_is_missing() -> None:
    """Not a traceback: the name of the variable, and what to install."""
    ran = run(
        "import sys\n"
        "from mlxd_shared.domain.errors import InvalidRequest\n"
        "sys.modules['opentelemetry'] = None\n"
        "try:\n"
        "    tracer_of('mlxd-test', os.environ)\n"
        "except InvalidRequest as error:\n"
        "    print(error)\n"
    )
    assert ENDPOINTS[1] in ran.stdout, ran.stderr
    assert "mlxd[otel]" in ran.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")],
)
def test_a_variable_that_makes_no_sense_is_refused(name: str, text: str) -> None:
    """As any other option is, at the start."""
    ran = run(
        "from mlxd_shared.domain.errors import InvalidRequest\n"
        "try:\n"
        "    tracer_of('mlxd-test', os.environ)\n"
        "except InvalidRequest as error:\n"
        "    print(error)\n",
        **{name: text},
    )
    assert "OTEL_*" in ran.stdout, ran.stderr
    assert text in ran.stdout


def test_without_the_variables_nothing_is_imported() -> None:
    """Neither a controller nor a gateway that traces nothing has OpenTelemetry in memory."""
    code = (
        "import sys, mlxd_controller.app, mlxd_gateway.process\n"
        "from mlxd_shared.ops.tracing import tracer_of\n"
        "assert tracer_of('mlxd-test', {}) is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
