"""The ports of a router's door: each advertised model has one, and a file says which.

Invariants:
- A model keeps its port while this process lives. Its number follows from the model's place among
  those named, or among all by name; models that come later have later ones.
- The file names exactly the models that can be asked for, and is replaced whole. It goes before
  the ports do, unless somebody else has written it meanwhile.
- A model whose port is taken keeps no other one waiting: its port is tried again at each look.
- The bounds are those of the controller's own door, for the ports of all models together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

from mlxd_controller.router.engine import DESCRIPTOR, Engine
from mlxd_controller.router.services import Services
from mlxd_controller.router.trust import Trust, TrustInterceptor
from mlxd_controller.runtime.ports import BrokenRef
from mlxd_controller.settings import RouterDoor
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.state_file import EVERYBODYS, replace_json
from mlxd_shared.security.net import PORT_MAX, SERVER_OPTIONS, Options, parse_address
from mlxd_shared.serving.server import add_service, listen
from mlxd_shared.wire.admission import AdmissionInterceptor, Room
from mlxd_shared.wire.interceptors import ErrorInterceptor

MANIFEST_VERSION: Final = 1
_WORK: Final = frozenset(f"/{DESCRIPTOR.full_name}/{name}" for name in ("Generate", "Embed"))
# One router has one connection to each port, and an abort must not wait behind its streams.
_OPTIONS: Final[Options] = (
    *SERVER_OPTIONS,
    ("grpc.max_concurrent_streams", config.CALLS_MAX + config.INQUIRIES_MAX),
    ("grpc.http.overload_protection", 0),
)
_log = get_logger("router")


class ModelPorts:
    """The servers of all advertised models. One owner: the controller's event loop."""

    def __init__(self, door: RouterDoor, services: Services, *, calls_max: int) -> None:
        """Prepare; nothing listens yet.

        Raises:
            InvalidRequest: the address or a network is none, or nobody is trusted to reach it.
        """
        self._door = door
        self._services = services
        self._address = parse_address(door.address)
        trust = Trust.of(door.networks)
        trust.check(self._address)
        host = self._address.target.rpartition(":")[0]
        if door.manifest is not None and _is_unspecified(host):
            problem = f"names an address to call at; listen at one of this machine, not at {host}"
            raise InvalidRequest.of("router_manifest", problem)
        self._interceptors: list[grpc.aio.ServerInterceptor] = [
            TrustInterceptor(trust),
            AdmissionInterceptor(calls_max, asks=lambda method: method not in _WORK),
            ErrorInterceptor(),
        ]
        self._tokenizers = Room("tokenizers being sent", config.ROUTER_TOKENIZERS_MAX)
        self._servers: dict[str, grpc.aio.Server] = {}
        """By model. Whoever drops a server stops it: gRPC's own references do not keep one."""
        self._targets: dict[str, str] = {}
        self._places: dict[str, int] = {}
        """By model, how far its port is from the first one; also where the port is taken."""
        self._advertised: list[str] | None = None

    async def start(self) -> None:
        """Listen for all models that there are; or, if some are named, for these.

        Raises:
            ModelNotFound, InvalidModel: a model that is named cannot be served.
            InvalidRequest: a port is taken, or the manifest cannot be written.
        """
        for name in self._door.models:
            await self._services.catalog.find(name)
        try:
            await self.look()
        except BaseException:
            await self.stop(None)
            raise

    async def follow(self) -> None:
        """Advertise models that come, and no longer those that go, until cancelled."""
        said = ""
        while True:
            await asyncio.sleep(config.ROUTER_LOOK_S)
            reason = ""
            try:
                await self.look()
            except MlxdError as error:
                reason = error.describe()
            if reason and reason != said:
                _log.warning("models are not advertised", reason=reason)
            said = reason

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls at once, and end those under way after `grace` seconds.

        The file goes first, so that no router comes by it to a port where nobody listens.
        """
        if self._door.manifest is not None and self._advertised is not None:
            await asyncio.to_thread(self._remove, self._door.manifest, self._advertised)
            self._advertised = None
        await asyncio.gather(*(server.stop(grace) for server in self._servers.values()))

    async def look(self) -> None:
        """Open ports for models that have come, and have the file say which there are.

        Raises:
            InvalidRequest: see `start`; later than that all other models are advertised first.
            MachineShort: the models cannot be listed.
        """
        names = list(dict.fromkeys(self._door.models)) or await self._names()
        failed: InvalidRequest | None = None
        for name in names[: config.ROUTER_MODELS_MAX]:
            if name not in self._places and len(self._places) < config.ROUTER_MODELS_MAX:
                self._places[name] = len(self._places)
            if name in self._places and name not in self._servers:
                try:
                    await self._open(name)
                except InvalidRequest as error:
                    failed = failed or error
        if failed is not None and self._advertised is None:
            raise failed  # at the start: a file that another process has written stays
        advertised = [name for name in names if name in self._servers]
        if advertised != self._advertised:
            if len(advertised) < len(names):
                left = len(names) - len(advertised)
                _log.warning("models without a port", count=left, limit=config.ROUTER_MODELS_MAX)
            if self._door.manifest is not None:
                await asyncio.to_thread(self._write, self._door.manifest, advertised)
            self._advertised = advertised
        if failed is not None:
            raise failed

    async def _names(self) -> list[str]:
        """Return the names of all models that can be served, in order."""
        refs = await self._services.catalog.store.list_models()
        return [ref.name for ref in refs if not isinstance(ref, BrokenRef)]

    async def _open(self, name: str) -> None:
        """Listen for a model at its port.

        Raises:
            InvalidRequest: it is taken, or there is none of its number.
        """
        host, _, first = self._address.target.rpartition(":")
        number = int(first) + self._places[name] if int(first) else 0
        if number > PORT_MAX:
            raise InvalidRequest.of("router", f"there is no port {number} for {name}")
        engine = Engine(name, self._services, tokenizers=self._tokenizers)
        server = grpc.aio.server(interceptors=self._interceptors, options=_OPTIONS)
        add_service(server, DESCRIPTOR, engine)
        # Who may call is seen to by the first interceptor.
        target = listen(server, parse_address(f"{host}:{number}"), anywhere=True)
        await server.start()
        self._servers[name], self._targets[name] = server, target
        _log.info("a router may ask for a model", model=name, address=target)

    def _write(self, manifest: Path, names: Sequence[str]) -> None:
        """Say where the models are, as routers read it. Blocks on the disk."""
        try:
            replace_json(manifest, self._content(names), mode=EVERYBODYS)
        except OSError as error:
            problem = f"{manifest} cannot be written: {error.strerror or error}"
            raise InvalidRequest.of("router_manifest", problem) from error

    def _remove(self, manifest: Path, names: Sequence[str]) -> None:
        """Remove the file, where it is still the one that names these. Blocks on the disk."""
        try:
            if json.loads(manifest.read_bytes()) == self._content(names):
                manifest.unlink()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            _log.warning("the manifest is left", path=str(manifest), reason=str(error))

    def _content(self, names: Sequence[str]) -> dict[str, object]:
        """Return what the file says."""
        workers = [{"url": f"grpc://{self._targets[name]}"} for name in names]
        return {"version": MANIFEST_VERSION, "workers": workers}


def _is_unspecified(host: str) -> bool:
    """Tell whether a host stands for all interfaces, however it is spelt."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
