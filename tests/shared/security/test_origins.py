"""Origins: what is one, and which pages and names belong to this machine."""

from __future__ import annotations

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.origins import check_origins, is_foreign, is_local_name

GOOD = ("*", "https://chat.example", "http://localhost:5173", "app://obsidian.md", "http://[::1]:1")
BAD = (
    "", "null", "chat.example", "https://", "https://chat.example/", "https://a b", "https://A.b",
    "https://a:x", "https://a:99999", "http://[::1", "https://user@a", "https://*.a/b",
)  # fmt: skip


def test_what_browsers_send_is_an_origin() -> None:
    """A scheme, a host and perhaps a port; or all of them."""
    check_origins(GOOD)


@pytest.mark.parametrize("origin", BAD)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    """It would be met by no page, and nobody would learn why."""
    with pytest.raises(InvalidRequest, match="http_origin"):
        check_origins(("https://chat.example", origin))


def test_a_star_lets_every_page_in() -> None:
    """Whoever names it means it; names of this machine are not concerned."""
    assert not is_foreign("https://else.example", "localhost", ("*",))
    assert not is_local_name("else.example", ("*",))


@pytest.mark.parametrize("host", ["", "[::1", "localhost.example", "127.0.0.1.example", "xn--a"])
def test_names_that_a_stranger_may_own(host: str) -> None:
    """Only addresses, localhost and what is below it are nobody else's."""
    assert not is_local_name(host, ())
