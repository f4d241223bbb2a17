"""The controller's gateway: a process of its own, started, watched and ended.

Invariants:
- It ends with the controller, however that ends: by request, killed after its grace, or by the end
  of its standard input if the controller was killed.
- If it ends by itself it is restarted at the same address; the controller keeps serving meanwhile.
- Its command line contains paths and addresses, never a secret.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress

from mlxd_controller.launcher.run_dir import RunDir
from mlxd_controller.settings import ServeSettings
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.extras import check_extra
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.image_urls import check_image_urls
from mlxd_shared.security.origins import check_origins

MODULE = "mlxd_gateway"
NEEDS = ("msgspec", "starlette", "uvicorn")
STOP_S = config.SHUTDOWN_GRACE_S + 5.0
_log = get_logger("gateway")


def check_usable(origins: Collection[str], image_urls: Collection[str] = ()) -> None:
    """Refuse to serve HTTP without the extra, or with an origin or a host that is not valid.

    Raises:
        InvalidRequest: naming `http`, `http_origin` or `image_urls`.
    """
    check_extra("http", "http", MODULE, *NEEDS)
    check_origins(origins)
    check_image_urls(image_urls)


def command_of(options: Mapping[str, object]) -> list[str]:
    """Return the command of a gateway; `options` are the fields of its Settings."""
    settings = {name: value for name, value in options.items() if value is not None}
    return [sys.executable, "-m", MODULE, json.dumps(settings, default=str)]


class Gateway:
    """The gateway of one controller, across restarts.

    It connects to a private socket, which needs none of the protection of the controller's address
    but the token, which every call needs. If there are keys, each request carries its own.
    """

    def __init__(self, settings: ServeSettings) -> None:
        """Prepare the gateway for `settings.http`; it connects to `private_address`.

        The controller must listen there before the gateway starts.
        """
        self._folder = RunDir.temporary()
        self.private_address = f"unix:{self._folder.path}/http.sock"
        files = settings.security
        self._options: dict[str, object] = {
            "listen": settings.http,
            "tls_cert": files.tls_cert,
            "tls_key": files.tls_key,
            "tls_client_ca": files.tls_client_ca,
            "token_file": None if files.keys_file else files.token_file,
            "pass_keys": files.keys_file is not None,
            "allow_remote": settings.allow_remote,
            "origins": list(settings.http_origins),
            "agent_rules": settings.http_agent_rules,
            "image_urls": list(settings.http_image_urls),
            "address": self.private_address,
            "controller_token_file": None if files.keys_file else files.token_file,
            "follow_parent": True,
            "log_level": settings.log_level,
            "log_format": settings.log_format,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._leaving = False

    async def start(self) -> str:
        """Start it; return its URL once it accepts requests.

        Raises:
            InvalidRequest: it did not start; its line on stderr gives the reason.
        """
        self._process = await asyncio.create_subprocess_exec(
            *command_of(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(config.HTTP_START_S):
                line = await self._process.stdout.readline()
        url = line.decode().strip()
        if not url.startswith(config.GATEWAY_LISTENS):
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._end()
            raise InvalidRequest.of("http", f"no gateway starts at {self._options['listen']}")
        url = url.removeprefix(config.GATEWAY_LISTENS)
        self._options["listen"] = url.rpartition("//")[2]  # with the port the system chose
        return url

    async def watch(self) -> None:
        """Restart it whenever it ends by itself; return once it is leaving."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if self._leaving:
                return
            _log.error("the gateway has ended; restarting it", code=code)
            await asyncio.sleep(config.HTTP_RESTART_S)
            if self._leaving:
                return
            try:
                await self.start()
            except (InvalidRequest, OSError) as error:
                _log.error("the gateway cannot start", reason=str(error))
            if self._leaving:
                self.leave()

    def leave(self) -> None:
        """Make it refuse new requests; those in progress have a grace."""
        self._leaving = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def close(self) -> None:
        """End it, and remove its private socket. Idempotent."""
        self.leave()
        await self._end()
        self._folder.close()

    async def _end(self) -> None:
        """Wait for the process to end; kill it if it takes too long."""
        process = self._process
        if process is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
