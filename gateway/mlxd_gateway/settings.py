"""What one gateway was told: where it listens, whose client it is, what protects both.

A gateway is started with its settings as one JSON object, the names being those of the fields; it
holds paths and addresses, never a secret.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mlxd import ChannelSecurity
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops import logs
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import parse_address


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a gateway.

    `listen` is HOST:PORT or unix:PATH; port 0 lets the system choose. `tls_*`, `token_file` and
    `allow_remote` protect it as a controller's do. `address` is the controller's, `controller_*`
    how to reach it. With `pass_keys` each request carries a key or the controller's token, which
    the controller judges. `origins` are those whose pages may use it from a browser. With
    `agent_rules` what agents change from turn to turn goes behind what stays (`agents.rules`).
    `image_urls` are the hosts from which images at addresses are fetched. With `follow_parent` it
    ends when its standard input does, which is when whoever started it is gone.
    """

    listen: str = config.DEFAULT_HTTP_ADDRESS
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    allow_remote: bool = False
    origins: tuple[str, ...] = ()
    address: str = config.DEFAULT_ADDRESS
    controller_tls_ca: Path | None = None
    controller_tls_cert: Path | None = None
    controller_tls_key: Path | None = None
    controller_token_file: Path | None = None
    pass_keys: bool = False
    agent_rules: bool = True
    image_urls: tuple[str, ...] = ()
    follow_parent: bool = False
    log_level: str = "info"
    log_format: logs.LogFormat = "auto"

    @property
    def files(self) -> ListenerFiles:
        """What protects what it listens on."""
        return ListenerFiles(self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file)

    @property
    def channel(self) -> ChannelSecurity:
        """How the controller is reached."""
        return ChannelSecurity(
            self.controller_tls_ca,
            self.controller_tls_cert,
            self.controller_tls_key,
            self.controller_token_file,
        )

    def check_keys(self) -> None:
        """Refuse keys beside a token, and keys that would travel in plain text.

        Raises:
            InvalidRequest: `pass_keys` does not go with what the other settings say.
        """
        if not self.pass_keys:
            return
        if self.token_file is not None or self.controller_token_file is not None:
            raise InvalidRequest.of("pass_keys", "goes with no token: requests carry their own")
        if self.controller_tls_ca is None and not parse_address(self.address).loopback:
            raise InvalidRequest.of("pass_keys", f"needs tls_ca: {self.address} is not loopback")


def read_settings(text: str) -> Settings:
    """Return the settings in a JSON object.

    Raises:
        InvalidRequest: it is none, or a value is wrong; names the field.
    """
    try:
        return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, TypeError) as error:
        raise InvalidRequest.of("settings", str(error)) from error
