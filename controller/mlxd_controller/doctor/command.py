"""`mlxd doctor`: facts, their judgement, the engine's proof, and what is remembered of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.configuration.keys import KEYS
from mlxd_controller.cli.configuration.reading import Configuration, load_configuration
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import Stores
from mlxd_controller.cli.terminal import show
from mlxd_controller.doctor import probes
from mlxd_controller.doctor.checks import judge
from mlxd_controller.doctor.facts import Facts, Finding, Port, PortUse, State
from mlxd_controller.doctor.proof import Verdict, judge_proof, run_proof
from mlxd_controller.launcher.run_dir import default_parent
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.shelves import demo_model
from mlxd_shared import config
from mlxd_shared.ops.backends import installed_versions
from mlxd_shared.ops.findings import FINDINGS_FILE, Proved, remember
from mlxd_shared.security.net import parse_address

REMEMBERED = "remembered"
SERVED_SECRETS = {
    "server's private key": "server.tls_key",
    "workers' token file": "workers.token_file",
    "workers' private key": "workers.tls_key",
    "key of prompts on disk": "stores.prefix_disk_key",
}
"""What a server would read, by the keys of its configuration."""
Engine = Annotated[
    bool, typer.Option(help="Prove the engine here, and switch off what is wrong or slow.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Prove one family alone and time nothing; remember nothing.")
]
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", envvar="MLXD_KEYS_FILE", help="The file of callers' keys."),
]


@ask_server
async def doctor(
    *,
    engine: Engine = True,
    quick: Quick = False,
    keys_file: KeysFile = None,
    stores: Stores,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode:
    """Look for what keeps models from being served here, rightly and fast.

    Looks at backend, device, memory, disks, ports, stores and files of secrets; then proves the
    engine: every fast path against the plain one, on a random model of each family. What fails or
    is slower is switched off for workers of this device and these versions. Exit code 1: there are
    faults.
    """
    places = stores.places(os.environ)
    findings = judge(await _gather(places, keys_file, where))
    verdict = Verdict()
    faults = {finding.check for finding in findings if finding.state is State.FAULT}
    if engine and "backend" not in faults:
        verdict = await _prove(places, quick=quick, quiet=as_json)
        findings += verdict.findings
        if verdict.proved is not None and not quick:
            findings.append(remember_proved(places.models_dir, verdict.proved))
    _show(findings, verdict, as_json=as_json)
    faulty = any(finding.state is State.FAULT for finding in findings)
    return ExitCode.ERROR if faulty else ExitCode.OK


async def _gather(places: StorePlaces, keys_file: Path | None, where: Server) -> Facts:
    """Ask every probe."""
    total_nbytes, available_nbytes = probes.probe_memory()
    folders = {"sockets in": default_parent(os.environ)}
    if places.models_dir is not None:
        folders["mlxd's models in"] = places.models_dir
    secrets = {
        "token file": where.security.token_file,
        "private key": where.security.tls_key,
        "keys file": keys_file,
        **secrets_of(load_configuration(os.environ)),
    }
    return Facts(
        configuration=probes.probe_configuration(os.environ),
        versions=installed_versions(),
        platform=sys.platform,
        gpus=probes.probe_gpus(os.environ),
        total_nbytes=total_nbytes,
        available_nbytes=available_nbytes,
        reserve_fraction=config.MEMORY_RESERVE_FRACTION,
        disks=tuple(probes.probe_disk(name, path) for name, path in folders.items()),
        ports=await _ports(where),
        stores=probes.probe_stores(places),
        secrets=tuple(
            probes.probe_secret(name, path) for name, path in secrets.items() if path is not None
        ),
    )


def secrets_of(configuration: Configuration) -> dict[str, Path | None]:
    """Return the secrets that a server here would read, by the environment or else by the file."""
    variables = {key.name: key.variable for key in KEYS}
    named = {
        name: configuration.variables.get(variables[key]) or configuration.values.get(key)
        for name, key in SERVED_SECRETS.items()
    }
    return {name: Path(str(path)) if path else None for name, path in named.items()}


async def _ports(where: Server) -> tuple[Port, ...]:
    """Look at the server's address, and at that of the HTTP APIs, which a server of ours may hold.

    Raises:
        InvalidRequest: the server's address is none.
    """

    async def ask_grpc() -> PortUse:
        return await probes.ask_server(where.address, where.security)

    served = await probes.probe_port("gRPC", parse_address(where.address), ask_grpc)

    async def ask_http() -> PortUse:
        return PortUse.OURS if served.use is PortUse.OURS else PortUse.OTHERS

    http = parse_address(config.DEFAULT_HTTP_ADDRESS)
    return served, await probes.probe_port("HTTP", http, ask_http)


async def _prove(places: StorePlaces, *, quick: bool, quiet: bool) -> Verdict:
    """Run the proof, and show on a terminal what it is at work on."""
    paths = [place.path for place in probes.list_models(places)]
    tokenizers = [demo_model(), *paths[: config.DOCTOR_TOKENIZERS_MAX - 1]]
    show_step = partial(show.step, quiet=quiet)
    ended = await run_proof(tokenizers, quick=quick, on_step=show_step)
    show_step("")
    return judge_proof(ended)


def remember_proved(folder: Path | None, proved: Proved) -> Finding:
    """Write down what is off; return the line about it."""
    off = ", ".join(proved.off) or "nothing"
    if folder is None:
        text = f"nothing: there is no directory of mlxd's own; {off} should be off"
        return Finding(REMEMBERED, State.NOTE, text)
    try:
        remember(folder, proved)
    except OSError as error:
        text = f"{folder / FINDINGS_FILE} cannot be written: {error.strerror}"
        return Finding(REMEMBERED, State.FAULT, text)
    return Finding(REMEMBERED, State.FINE, f"{off} is off, in {folder / FINDINGS_FILE}")


def _show(findings: Sequence[Finding], verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        device = None if verdict.proved is None else asdict(verdict.proved)
        report = {"findings": findings, "engine": verdict.results, "proved": device}
        show.json_line(report)
        return
    show.table(
        ("check", "state", "what"),
        [(each.check, each.state.value, each.text) for each in findings],
    )
