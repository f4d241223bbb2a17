"""What protects a listener: TLS, client certificates, a token; read at start or refused at start.

Invariants:
- What an operator names is used or refused; nothing is dropped in silence.
- An address that other machines can reach is served only with TLS and a way to know the caller (a
  token, or client certificates), unless the operator says that it is meant to be open.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.certificates import Identity, load_authorities, load_identity
from mlxd_shared.security.key_file import KeyFile
from mlxd_shared.security.keys import ANYBODY, Caller
from mlxd_shared.security.net import Address
from mlxd_shared.security.tokens import Token, read_token, secret_in


@dataclass(frozen=True, slots=True)
class ListenerFiles:
    """What an operator named. `open_health` answers grpc.health.v1 without the token."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    open_health: bool = False
    keys_file: Path | None = None

    def load(self) -> ListenerSecurity:
        """Read every file.

        Raises:
            InvalidRequest: one of two options that need each other is missing.
            BadCredentials: a file cannot be used; see certificates and bearer.
        """
        cert, key = self.tls_cert, self.tls_key
        if bool(cert) != bool(key):
            missing, present = ("tls_key", "tls_cert") if cert else ("tls_cert", "tls_key")
            raise InvalidRequest.of(missing, f"is needed with {present}")
        if self.tls_client_ca and not cert:
            raise InvalidRequest.of("tls_client_ca", "needs tls_cert and tls_key")
        if self.open_health and not (self.token_file or self.keys_file):
            raise InvalidRequest.of("open_health", "means nothing without token_file or keys_file")
        return ListenerSecurity(
            identity=load_identity(cert, key) if cert and key else None,
            client_ca=load_authorities(self.tls_client_ca) if self.tls_client_ca else None,
            token=read_token(self.token_file) if self.token_file else None,
            keys=KeyFile(self.keys_file) if self.keys_file else None,
            files=self,
        )


NO_FILES = ListenerFiles()
"""No protection was asked for."""


@dataclass(frozen=True, slots=True)
class ListenerSecurity:
    """The files' content, proved usable. Holds secrets; they are not in its text form."""

    identity: Identity | None = None
    client_ca: bytes | None = None
    token: Token | None = None
    keys: KeyFile | None = None
    files: ListenerFiles = NO_FILES

    @property
    def knows_callers(self) -> bool:
        """Whether strangers are kept out and nobody on the way can listen."""
        return self.identity is not None and (self.needs_secret or self.client_ca is not None)

    @property
    def needs_secret(self) -> bool:
        """Whether every call carries the token or a key."""
        return self.token is not None or self.keys is not None

    def caller_of(self, header: str) -> Caller | None:
        """Return who sends `header` as authorization; None: nobody who is known."""
        if self.token is not None and self.token.accepts(header):
            return ANYBODY
        key = None if self.keys is None else self.keys.ring.find(secret_in(header))
        return None if key is None else Caller(key)

    def check(self, address: Address, *, anywhere: bool) -> None:
        """Refuse an address that this does not protect.

        Raises:
            InvalidRequest: others can reach it, and neither this nor `anywhere` allows that; or
                TLS is asked for on a Unix socket.
        """
        if address.is_unix and self.identity is not None:
            raise InvalidRequest.of(
                "tls_cert", "is for TCP; a Unix socket is private by its folder"
            )
        if not (address.loopback or anywhere or self.knows_callers):
            needs = "TLS and a token, keys or a client CA, or --allow-remote to serve everybody"
            raise InvalidRequest.of("address", f"{address.target} is not loopback: give {needs}")

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return what gRPC binds with; None: plain text."""
        if self.identity is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.identity.key, self.identity.certificates)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the same protection for a listener that is not gRPC's; None: plain text."""
        if self.identity is None:
            return None
        assert self.files.tls_cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.files.tls_cert, self.files.tls_key)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


OPEN = ListenerSecurity()
"""Plain text, no token: what loopback and private Unix sockets have unless told otherwise."""
