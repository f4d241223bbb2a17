"""`python -m mlxd_worker.proof`: prove the engine on this machine, a line of JSON for each result.

Lines: `{"trying": TEXT}` before each step, `{"check", "subject", "problem", "off"}` after it, and
at the end `{"device", "versions", "off"}`, which is what is remembered. Where the backend cannot be
used there is one line, `{"error": TEXT}`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from mlxd_models.families.registry import REGISTRY
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import versions_of
from mlxd_worker.machine.backend import Backend, prepare_backend
from mlxd_worker.proof.families import WIDE, WIDEST
from mlxd_worker.proof.judging import Result
from mlxd_worker.tokenizing.files import load_tokenizer

LLAMA: Final = "LlamaForCausalLM"
TEXT: Final = "The quick brown fox, 12 times. "


def check_tokenizer(path: Path) -> str | None:
    """Return what is wrong with a model's tokenizer, or None. Blocks on the disk."""
    try:
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode(TEXT)
        text = tokenizer.decode(ids)
    except MlxdError as error:
        return error.describe()
    # One that lowers letters or knows few of them is whole; one that gives none back is not.
    if set(text.lower()).isdisjoint(set(TEXT.lower()) - {" "}):
        return f"{TEXT!r} comes back as {text!r:.80}"
    return None


class Report:
    """The proof's results, as lines, and what it has switched off."""

    def __init__(self) -> None:
        self.off: dict[FastPath, str] = {}

    def say(self, **line: object) -> None:
        """Write one line."""
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def trying(self, step: str) -> None:
        """Say what comes next: the last word of a process that a kernel ends."""
        self.say(trying=step)

    def result(self, result: Result) -> None:
        """Say what a check came to."""
        if result.off is not None:
            self.off[result.off] = f"{result.check}: {result.problem} ({result.subject})"
        self.say(**asdict(result))


def main() -> int:
    """Prove everything, and return the exit code: 0 also where much is wrong."""
    parser = argparse.ArgumentParser(prog="python -m mlxd_worker.proof")
    parser.add_argument("--quick", action="store_true", help="one family, and no times")
    parser.add_argument("--tokenizer", type=Path, action="append", default=[], metavar="MODEL")
    args = parser.parse_args()
    report = Report()
    for path in args.tokenizer:
        report.trying(f"the tokenizer of {path.name}")
        report.result(Result("tokenizer", str(path), check_tokenizer(path) or ""))
    try:
        backend = prepare_backend()
    except MlxdError as error:
        report.say(error=error.describe())
        return 0
    _prove(report, backend, quick=args.quick)
    return 0


def _prove(report: Report, backend: Backend, *, quick: bool) -> None:
    """Prove the engine; imports MLX, which the BLAS stands under by now."""
    from mlxd_worker.machine.device_name import device_name  # noqa: PLC0415
    from mlxd_worker.proof.prover import Prover  # noqa: PLC0415
    from mlxd_worker.proof.subjects import make_subject  # noqa: PLC0415
    from mlxd_worker.proof.timing import engine_run  # noqa: PLC0415

    blas = backend.blas
    report.say(blas=blas.name, version=blas.version, threads=blas.threads, reason=blas.reason)
    prover = Prover(report.result, report.trying)
    prover.prove_products(backend.kind)
    with tempfile.TemporaryDirectory(prefix="mlxd-proof-") as root:
        for name in [LLAMA] if quick else sorted(REGISTRY):
            subject = make_subject(name, Path(root) / name, backend.kind)
            prover.prove_family(subject)
        if not quick:
            sizes = WIDE if backend.kind is DeviceKind.CPU else WIDEST
            subject = make_subject(LLAMA, Path(root) / "wide", backend.kind, sizes)
            prover.prove_speed(subject, engine_run(subject))
    versions = versions_of(backend)
    report.say(device=device_name(backend.kind), versions=versions, off=report.off)


if __name__ == "__main__":
    sys.exit(main())
