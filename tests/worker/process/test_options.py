"""The worker's command line: what it takes, and what it says of what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import Weights
from mlxd_shared.domain.units import format_bytes
from mlxd_worker.process.options import parse_options
from mlxd_worker.thread.facts import DiskFolder


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--orphan-grace", "-1", f"-1 is outside 0 to {config.LOAD_TOTAL_TIMEOUT_S} seconds"),
        ("--stop-grace", "1e9", f"1e9 is outside 0 to {config.LOAD_TOTAL_TIMEOUT_S} seconds"),
        ("--stop-grace", "nan", f"nan is outside 0 to {config.LOAD_TOTAL_TIMEOUT_S} seconds"),
        ("--prefix-cache", "9EiB", "'9EiB'"),
        (
            "--prefix-cache",
            str(config.PREFIX_CACHE_BYTES_LIMIT + 1),
            f"is above {format_bytes(config.PREFIX_CACHE_BYTES_LIMIT)}",
        ),
        ("--prefix-disk-size", "1GiB", "needs --prefix-disk"),
        ("--prefix-disk-size", "9EiB", "'9EiB'"),
        ("--prefix-disk-key", "k", "--prefix-disk-key: needs --prefix-disk"),
        ("--waiting-max", "-1", f"-1 is outside 0 to {config.WAITING_STREAMS_LIMIT}"),
        (
            "--waiting-max",
            str(config.WAITING_STREAMS_LIMIT + 1),
            f"is outside 0 to {config.WAITING_STREAMS_LIMIT}",
        ),
        ("--replay-steps", "-1", f"-1 is outside 0 to {config.CONTEXT_LENGTH_LIMIT}"),
        (
            "--replay-steps",
            str(config.CONTEXT_LENGTH_LIMIT + 1),
            f"is outside 0 to {config.CONTEXT_LENGTH_LIMIT}",
        ),
        ("--machine", "m" * 254, f"at most {config.MACHINE_NAME_CHARS_MAX} printable characters"),
        ("--machine", "a\nb", f"at most {config.MACHINE_NAME_CHARS_MAX} printable characters"),
        ("--threads", "0", f"0 is outside 1 to {(1 << 31) - 1}"),
        ("--rows-max", str(1 << 31), f"{1 << 31} is outside 1 to {(1 << 31) - 1}"),
        ("--context-length", "-5", f"-5 is outside 1 to {(1 << 31) - 1}"),
        ("--weights", "int3", "invalid choice: 'int3'"),
        ("--kv-format", "q3", "invalid choice: 'q3'"),
        ("--log-level", "loud", "invalid choice: 'loud'"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_range(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named, with what was given and the limit."""
    with pytest.raises(SystemExit) as caught:
        parse_options([f"{option}={value}"])

    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {option}: " in message
    assert problem in message


def test_bounds_themselves_are_taken() -> None:
    """The least and the most of each."""
    least = parse_options(
        [
            "--orphan-grace=0",
            "--waiting-max=0",
            "--replay-steps=0",
            "--threads=1",
            "--prefix-cache=0",
            "--prefix-disk=blocks",
            "--prefix-disk-size=0",
            "--prefix-disk-key=k",
        ]
    )
    most = parse_options(
        [
            f"--stop-grace={config.LOAD_TOTAL_TIMEOUT_S}",
            f"--waiting-max={config.WAITING_STREAMS_LIMIT}",
            f"--replay-steps={config.CONTEXT_LENGTH_LIMIT}",
            f"--prefix-cache={config.PREFIX_CACHE_BYTES_LIMIT}",
            "--prefix-disk=blocks",
            f"--prefix-disk-size={config.PREFIX_CACHE_BYTES_LIMIT}",
        ]
    )

    assert (least.orphan_grace_s, least.waiting_max, least.replay_steps) == (0.0, 0, 0)
    assert (least.threads, least.spec.prefix_cache_nbytes) == (1, 0)
    assert most.stop_grace_s == config.LOAD_TOTAL_TIMEOUT_S
    assert (most.waiting_max, most.replay_steps) == (
        config.WAITING_STREAMS_LIMIT,
        config.CONTEXT_LENGTH_LIMIT,
    )
    assert most.spec.prefix_cache_nbytes == config.PREFIX_CACHE_BYTES_LIMIT
    assert least.prefix_disk == DiskFolder(Path("blocks"), 0)
    assert (least.prefix_disk_key, most.prefix_disk_key) == (Path("k"), None)
    assert most.prefix_disk == DiskFolder(Path("blocks"), config.PREFIX_CACHE_BYTES_LIMIT)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (f"--context-length={config.CONTEXT_LENGTH_MIN - 1}", "options.context_length"),
        (f"--context-length={config.CONTEXT_LENGTH_LIMIT + 1}", "options.context_length"),
        (f"--rows-max={config.ROWS_MAX_LIMIT + 1}", "options.rows_max"),
    ],
)
def test_a_load_has_the_bounds_that_it_has_on_the_wire(option: str, field: str) -> None:
    """A count that no load may have is refused by the name that the wire gives it."""
    with pytest.raises(InvalidRequest) as caught:
        parse_options([option])

    assert [violation.field for violation in caught.value.violations] == [field]


def test_what_is_not_said_has_its_default() -> None:
    """A worker that is started by hand serves like one that the controller starts."""
    options = parse_options([])
    another = parse_options([])

    assert options.incarnation != another.incarnation
    assert (options.listen, options.model, options.name, options.device) == (None, None, "", "")
    assert (options.orphan_grace_s, options.stop_grace_s) == (
        config.ORPHAN_GRACE_S,
        config.WORKER_STOP_GRACE_S,
    )
    assert (options.waiting_max, options.replay_steps) == (config.WAITING_STREAMS_MAX, 0)
    assert (options.spec.weights, options.spec.kv_format) == (Weights.AUTO, None)
    assert (options.log_level, options.log_format) == ("info", "auto")
    assert options.prefix_disk is None
    disk = parse_options(["--prefix-disk", "blocks"]).prefix_disk
    assert disk == DiskFolder(Path("blocks"), config.PREFIX_DISK_BYTES_DEFAULT)
    assert not options.allow_remote
    assert not options.security.open_health


def test_a_worker_that_widens_nothing_takes_no_numpy() -> None:
    """It is 10 MB of every worker, which the fit reckons only for those that widen weights."""
    code = "import mlxd_worker.thread.host, sys; print({'mlx.core', 'numpy'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout == "{'mlx.core'}\n"


def test_a_model_is_called_like_its_folder() -> None:
    """Unless it is given a name."""
    assert parse_options(["--model=/models/llama/"]).name == "llama"
    assert parse_options(["--model=/models/llama", "--name=best"]).name == "best"
