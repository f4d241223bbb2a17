"""Addresses of images: which are read, which hosts are named, and what nobody ever dials."""

from __future__ import annotations

import pytest

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.image_urls import (
    BadUrl,
    check_image_urls,
    is_link,
    is_named,
    is_public,
    read_url,
)

PUBLIC = ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "1.1.1.1")
NOT_PUBLIC = (
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1",
    "ff02::1", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "64:ff9b::a00:1", "2002:a00:1::1",
    "2001:0:a00:1::1", "2001:db8::1", "no address", "",
)  # fmt: skip
READ = {
    "https://a.example/b.png": ("https", "a.example", 443, "/b.png"),
    "HTTP://A.example": ("http", "a.example", 80, "/"),
    "http://a.example:80/b?c=d#e": ("http", "a.example", 80, "/b?c=d"),
    "https://[2606:2800::1]/b": ("https", "2606:2800::1", 443, "/b"),
    "http://2130706433/": ("http", "2130706433", 80, "/"),
}
UNREAD = {
    "": "visible ASCII",
    "ftp://a.example/b": "http and https",
    "file:///etc/passwd": "http and https",
    "http://user:word@a.example/": "user or a password",
    "http://@a.example/": "user or a password",
    "http:///b": "no host",
    "http://a..example/": "no host",
    "http://a.example./": "no host",
    "http://%31.example/": "no host",
    "http://[fe80::1%25eth0]/": "no host|no address",
    "http://[::1": "no address",
    "http://a.example:8080/": "no port but 80",
    "https://a.example:80/": "no port but 443",
    "http://a.example:0/": "no port but 80",
    "http://a.example:99999/": "no address",
    "http://a.example/b c": "visible ASCII",
    "http://a.example/\r\nHost: b": "visible ASCII",
    "http://a.example\\@b.example/": "without a backslash",
    "http://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.example/": "visible ASCII",
    f"http://a.example/{'b' * config.IMAGE_URL_CHARS_MAX}": "at most",
}


@pytest.mark.parametrize("address", PUBLIC)
def test_everybody_reaches_a_public_address(address: str) -> None:
    """Of either family."""
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_other_address_is_public(address: str) -> None:
    """Loopback, private, shared, link-local, multicast, reserved; those that hold another one."""
    assert not is_public(address)


@pytest.mark.parametrize("text", READ)
def test_an_address_is_read(text: str) -> None:
    """Scheme, host, port and target; what is behind # stays with the client."""
    url = read_url(text)
    assert (url.scheme, url.host, url.port, url.target) == READ[text]
    assert read_url(str(url)) == url
    assert is_link(text)


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_never_fetched_is_said(text: str) -> None:
    """Another scheme or port, a user, no host, characters that a request could not hold."""
    with pytest.raises(BadUrl, match=UNREAD[text]):
        read_url(text)


def test_hosts_are_named() -> None:
    """By themselves, all below one, or all; the end of a name alone names nothing."""
    for named in (["a.example"], ["*.example"], ["public"], ["b.example", "a.example"]):
        assert is_named("a.example", named)
    for named in ([], ["b.example"], ["*.a.example"], ["example"], ["*.xample"]):
        assert not is_named("a.example", named)


@pytest.mark.parametrize("entry", ["a.example", "*.a.example", "public", "localhost", "10.0.0.1"])
def test_what_names_a_host_is_taken(entry: str) -> None:
    """Also one that is not public: it is refused where it is dialled."""
    check_image_urls((entry,))


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "A.example", "https://a.example", "a.example/b", "a.example:80", "a b"]
)
def test_what_names_none_is_refused(entry: str) -> None:
    """It would never be met, and nobody would learn why."""
    with pytest.raises(InvalidRequest, match="image_urls"):
        check_image_urls(("a.example", entry))
