"""One node's machine as its agent uses it: the launcher and the probe of mlxd on a single machine.

Invariants:
- A worker listens at the node's own address, never at all of them: its ready line names the address
  that controllers dial.
- A worker does not outlive its agent, which alone is asked about it.
- Off loopback a worker serves with TLS and a token only; it refuses to start otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from mlxd_controller.fleet.facts import AgentOptions
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_controller.memory.device import make_probe, usable_gpus
from mlxd_controller.runtime.ports import DeviceProbe, Launcher
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

CERT, KEY, TOKEN, AUTHORITY = "node.pem", "node.key", "token", "ca.pem"
"""Files in the folder for TLS: on a node its certificate, key and token; for controllers the
token, and the authorities that signed the nodes' certificates."""


NO_GRACE_S = 0.0
"""For workers whose agent has ended: no other agent can take them over, so they end at once."""


class Machine(Protocol):
    """Makes what an agent uses."""

    def launcher(self, options: AgentOptions) -> Launcher:
        """Return a launcher of workers as these options want them."""

    def probe(self, options: AgentOptions) -> DeviceProbe:
        """Return what measures this machine's memory, by the names that devices have alone."""

    def close(self) -> None:
        """Remove what launchers made; only when no worker is left."""


class OwnMachine:
    """Implements Machine on the machine of this process, whose workers listen at `host`."""

    def __init__(self, node: str, host: str) -> None:
        """Look at the GPUs, as they are before any worker runs."""
        self._node = node
        self._host = f"[{host}]" if ":" in host else host
        self._gpus = usable_gpus(os.environ)
        self._launchers: list[SubprocessLauncher] = []

    def launcher(self, options: AgentOptions) -> SubprocessLauncher:
        """Return a launcher; see the port."""
        launcher = SubprocessLauncher(
            stall_timeout_s=options.stall_timeout_s,
            orphan_grace_s=NO_GRACE_S,
            waiting_max=options.waiting_max,
            gpu_ids={f"{self._node}/{gpu.name}": gpu.id for gpu in self._gpus},
            findings=Path(options.findings) if options.findings else None,
            listen=f"tcp:{self._host}:0",
            further=("--machine", self._node, *_tls_options(options.tls)),
        )
        self._launchers.append(launcher)
        return launcher

    def probe(self, options: AgentOptions) -> DeviceProbe:
        """Return a probe; see the port."""
        return make_probe(options.limits, gpus=self._gpus)

    def close(self) -> None:
        """Remove what launchers made; see the port."""
        while self._launchers:
            self._launchers.pop().close()


def _tls_options(folder: str) -> tuple[str, ...]:
    """Return a worker's options for the files of a node."""
    if not folder:
        return ()
    files = (("--tls-cert", CERT), ("--tls-key", KEY), ("--token-file", TOKEN))
    return tuple(word for flag, name in files for word in (flag, str(Path(folder) / name)))


def channel_of(folder: Path | None) -> ChannelSecurity:
    """Return how a controller reaches the workers of nodes."""
    if folder is None:
        return PLAIN
    return ChannelSecurity(tls_ca=folder / AUTHORITY, token_file=folder / TOKEN)
