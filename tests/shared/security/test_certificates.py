"""What a certificate, key or token file must be; each problem names its file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.security.certificates import load_authorities, load_identity, validity
from mlxd_shared.security.tokens import Token, read_token
from tests.support.certificates import SECRET, Authority, token_file

KEY = ec.generate_private_key(ec.SECP256R1())
FIRST, LAST = datetime(1951, 1, 1), datetime(9999, 12, 30)  # noqa: DTZ001 - hypothesis adds UTC
MOMENTS = st.datetimes(FIRST, LAST, timezones=st.just(UTC))


def self_signed(not_before: datetime, not_after: datetime, *, names: int = 1) -> bytes:
    """Return the DER of a certificate; many `names` make its lengths long."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"n{i}") for i in range(names)])
    builder = x509.CertificateBuilder(name, name, KEY.public_key(), 7, not_before, not_after)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


WHOLE = self_signed(datetime(2020, 1, 1, tzinfo=UTC), datetime(2060, 1, 1, tzinfo=UTC))


@given(MOMENTS, st.timedeltas(timedelta(0), timedelta(days=20_000)), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_dates_are_those_that_another_parser_reads(
    start: datetime, length: timedelta, names: int
) -> None:
    """Whatever form the dates and lengths have, before and after 2050."""
    end = min(start + length, datetime(9999, 12, 31, tzinfo=UTC))
    der = self_signed(start, end, names=names)

    other = x509.load_der_x509_certificate(der)
    ours = validity(der)
    assert ours.not_before == other.not_valid_before_utc
    assert ours.not_after == other.not_valid_after_utc


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_der_is_an_error_never_a_hang(data: st.DataObject) -> None:
    """Cut or changed bytes give dates or an expected error, and nothing else."""
    der = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(0, 3))):
        der[data.draw(st.integers(0, 120))] = data.draw(st.integers(0, 255))
    cut = bytes(der[: data.draw(st.integers(0, len(der)))])
    try:
        assert validity(cut).not_after.tzinfo is UTC
    except ValueError:
        return


def test_a_good_pair_is_read(tmp_path: Path) -> None:
    """The identity holds both files and says when it ends; its text form has no key."""
    pair = Authority(tmp_path).issue(days=30)
    identity = load_identity(pair.cert, pair.key)

    assert identity.certificates == pair.cert.read_bytes()
    assert identity.key == pair.key.read_bytes()
    assert timedelta(days=29) < identity.not_after - datetime.now(UTC) < timedelta(days=31)
    assert "PRIVATE" not in repr(identity)


@pytest.mark.parametrize(
    ("days", "since_days", "problem"),
    [(-1, -30, "the certificate has expired on"), (30, 1, "the certificate is valid from")],
)
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, days: int, since_days: int, problem: str
) -> None:
    """The error names the file and the day."""
    pair = Authority(tmp_path).issue(days=days, since_days=since_days)
    day = datetime.now(UTC) + timedelta(days=days if days < 0 else since_days)

    with pytest.raises(BadCredentials, match=f"{problem} {day:%Y-%m-%d}") as caught:
        load_identity(pair.cert, pair.key)
    assert caught.value.file == str(pair.cert)


def test_a_certificate_that_expires_soon_is_named_in_the_log(tmp_path: Path) -> None:
    """The operator hears of it before it is too late."""
    pair = Authority(tmp_path).issue(days=3)
    with capture_logs() as lines:
        load_identity(pair.cert, pair.key)

    assert [(line["event"], line["file"]) for line in lines] == [
        ("the certificate expires soon", str(pair.cert))
    ]


BAD_FILES = {
    "missing": (None, "there is no such file"),
    "empty": (b"", "is empty or too large"),
    "large": (b"x" * (config.CREDENTIAL_FILE_BYTES_MAX + 1), "is empty or too large"),
    "text": (b"hello\n", "holds no PEM certificate"),
    "damaged": (
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        "certificate 1 is damaged",
    ),
    "not base64": (
        b"-----BEGIN CERTIFICATE-----\n\xff\xfe\n-----END CERTIFICATE-----\n",
        "certificate 1 is damaged",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("role", ["certificate", "authorities"])
def test_a_bad_certificate_file_is_refused(tmp_path: Path, kind: str, role: str) -> None:
    """The error names the file and says what is wrong with it."""
    content, problem = BAD_FILES[kind]
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    key = Authority(tmp_path).issue().key

    with pytest.raises(BadCredentials, match=problem) as caught:
        load_authorities(bad) if role == "authorities" else load_identity(bad, key)
    assert caught.value.file == str(bad)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    """The error names the key and the certificate."""
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")

    with pytest.raises(BadCredentials, match=r"belongs to another certificate than .*one\.pem"):
        load_identity(one.cert, other.key)


def test_an_encrypted_key_is_refused_without_asking(tmp_path: Path) -> None:
    """Nobody is asked for a passphrase on a terminal."""
    pair = Authority(tmp_path).issue()
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(BadCredentials, match="is encrypted"):
        load_identity(pair.cert, pair.key)


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    """The error is about the key, not about the certificate."""
    pair = Authority(tmp_path).issue()
    with pytest.raises(BadCredentials, match="not a private key") as caught:
        load_identity(pair.cert, pair.cert)

    assert caught.value.file == str(pair.cert)


def test_expired_authorities_are_refused(tmp_path: Path) -> None:
    """A bundle is good while one authority in it is."""
    authority = Authority(tmp_path)
    old = Authority(tmp_path, "old").issue("old-leaf", days=-1).cert
    old.write_bytes(old.read_bytes().split(b"-----END CERTIFICATE-----")[0]
                    + b"-----END CERTIFICATE-----\n")  # fmt: skip

    with pytest.raises(BadCredentials, match="every authority in it has expired, on 2"):
        load_authorities(old)
    old.write_bytes(old.read_bytes() + authority.path.read_bytes())
    assert load_authorities(old) == old.read_bytes()


@pytest.mark.parametrize("secret", ["key", "token"])
def test_a_secret_that_all_can_read_is_named_in_the_log(tmp_path: Path, secret: str) -> None:
    """It is used, and the operator is told; a private one is not worth a line."""
    pair, token = Authority(tmp_path).issue(), token_file(tmp_path)
    for mode, expected in ((0o640, []), (0o644, ["a secret that every user can read"])):
        path = pair.key if secret == "key" else token
        path.chmod(mode)
        with capture_logs() as lines:
            load_identity(pair.cert, pair.key)
            read_token(token)

        assert [line["event"] for line in lines] == expected


@pytest.mark.parametrize(
    "value",
    ["", "short", "a" * (config.TOKEN_CHARS_MAX + 1), "two lines\nof it all", "with space" * 3,
     " " + SECRET, SECRET + " ", "ünïcödé" * 4, SECRET + "\n"],
)  # fmt: skip
def test_a_token_file_holds_one_token(tmp_path: Path, value: str) -> None:
    """Anything else is refused, and what the file holds is in no message."""
    path = token_file(tmp_path, value)
    with pytest.raises(BadCredentials) as caught:
        read_token(path)

    assert caught.value.file == str(path)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_token_is_compared_whole(tmp_path: Path, end: str) -> None:
    """Only the very token is accepted, under its scheme in any case; it prints as nothing."""
    path = tmp_path / "token"
    path.write_bytes((SECRET + end).encode())
    token = read_token(path)

    assert token.accepts(f"Bearer {SECRET}")
    assert token.accepts(f"bearer {SECRET}")
    for bad in ("", SECRET, "Bearer ", f"Basic {SECRET}", f"Bearer {SECRET}x",
                f"Bearer {SECRET[:-1]}", f"Bearer  {SECRET}", "Bearer \udcff"):  # fmt: skip
        assert not token.accepts(bad), bad
    assert token.header == ("authorization", f"Bearer {SECRET}")
    assert repr(token) == "Token(...)"
    assert not Token("x" * 16).accepts(f"Bearer {SECRET}")
