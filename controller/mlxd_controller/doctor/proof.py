"""The engine's proof, which runs in a process of its own: started, heard to its end, and told of.

Invariants:
- However that process ends, what it has said counts; what it was at work on when it died is a
  finding of its own.
- It is gone when this returns or is cancelled, and so are the models that it has written, however
  it ended: its temporary folder is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlxd_controller.doctor.facts import Finding, State
from mlxd_controller.launcher.environment import own_environment
from mlxd_shared import config
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import Proved

PROOF_COMMAND: Final = (sys.executable, "-m", "mlxd_worker.proof")
ENGINE: Final = "engine"
SLOW_BLAS: Final = "reference"
_LINE_BYTES_MAX: Final = 1 << 20
_TAIL_BYTES: Final = 2000

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a proof ended, and what it was at work on then."""

    lines: tuple[Line, ...] = ()
    exit_code: int | None = 0
    """Negative: the signal that ended it; None: it was silent for too long."""
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a proof comes to. `proved`: None where it did not come to its end."""

    findings: tuple[Finding, ...] = ()
    proved: Proved | None = None
    results: tuple[Line, ...] = field(default=(), repr=False)
    """What it said, for programs."""


async def run_proof(
    tokenizers: Iterable[Path],
    *,
    quick: bool,
    on_step: Callable[[str], None],
    command: Sequence[str] = PROOF_COMMAND,
    silent_max_s: float = config.DOCTOR_SILENT_MAX_S,
) -> Ended:
    """Run the proof to its end. `on_step` is told of each step as it begins.

    Raises:
        OSError: it cannot be started.
    """
    models = [word for path in tokenizers for word in ("--tokenizer", str(path))]
    lines: list[Line] = []
    async with _running((*command, *(("--quick",) if quick else ()), *models)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(_tail(process.stderr))
        try:
            while raw := await asyncio.wait_for(process.stdout.readline(), silent_max_s):
                line = _read(raw)
                lines.append(line)
                if "trying" in line:
                    on_step(line["trying"])
            code = await asyncio.wait_for(process.wait(), silent_max_s)
        except TimeoutError:
            errors.cancel()
            return Ended(tuple(lines), None)
        return Ended(tuple(lines), code, await errors)


def judge_proof(ended: Ended) -> Verdict:
    """Return what the lines and the end of a proof come to. Pure."""
    results = [line for line in ended.lines if "check" in line]
    errors = [line["error"] for line in ended.lines if "error" in line]
    findings = [
        *(_of_blas(line) for line in ended.lines if "blas" in line),
        *(Finding(ENGINE, State.FAULT, error) for error in errors),
        *_of_results(results),
    ]
    last = ended.lines[-1] if ended.lines else {}
    if ended.exit_code != 0:
        trying = next((line["trying"] for line in reversed(ended.lines) if "trying" in line), "")
        findings.append(Finding(ENGINE, State.FAULT, _death(ended, trying)))
    if ended.exit_code != 0 or "device" not in last:
        return Verdict(tuple(findings), None, tuple(results))
    off = {FastPath(name): str(reason) for name, reason in last["off"].items()}
    proved = Proved(last["device"], last["versions"], off)
    findings.append(Finding("device", State.FINE, proved.device))
    return Verdict(tuple(findings), proved, tuple(results))


def _read(raw: bytes) -> Line:
    """Return a line's object; {} for what some library has written there."""
    try:
        line = json.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _of_blas(line: Line) -> Finding:
    text = f"{line['blas']} {line['version']}, {line['threads']} threads: {line['reason']}"
    return Finding("BLAS", State.FAULT if line["blas"] == SLOW_BLAS else State.FINE, text)


def _of_results(results: Sequence[Line]) -> list[Finding]:
    """Return each problem, and for each check one line about all that went well."""
    findings = []
    for check in dict.fromkeys(line["check"] for line in results):
        own = [line for line in results if line["check"] == check]
        for line in own:
            if line["problem"]:
                off = f"; {line['off']} is switched off" if line["off"] else ""
                text = f"{line['subject']}: {line['problem']}{off}"
                findings.append(Finding(check, State.FAULT, text))
        fine = [line["subject"] for line in own if not line["problem"]]
        if fine:
            text = fine[0] if len(own) == 1 else f"{len(fine)} of {len(own)}"
            findings.append(Finding(check, State.FINE, text))
    return findings


def _death(ended: Ended, trying: str) -> str:
    at = f" at {trying}" if trying else ""
    if ended.exit_code is None:
        return f"the proof said nothing more{at}, and was ended"
    if ended.exit_code < 0:
        return f"the proof was ended by {signal.Signals(-ended.exit_code).name}{at}"
    return f"the proof failed{at}: {ended.last_words or ended.exit_code}"


@contextlib.asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process in a session of its own, which is ended with the body."""
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="mlxd-proof-") as folder:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            limit=_LINE_BYTES_MAX, env={**own_environment(), "TMPDIR": folder},
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _tail(stream: asyncio.StreamReader) -> str:
    """Read to the end; return the last line."""
    kept = b""
    while part := await stream.read(_TAIL_BYTES):
        kept = (kept + part)[-_TAIL_BYTES:]
    lines = kept.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
