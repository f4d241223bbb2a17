"""A gateway's settings: what the controller writes, read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.gateway import command_of
from mlxd_gateway.settings import read_settings
from mlxd_shared.domain.errors import InvalidRequest


def test_what_a_controller_writes_is_read() -> None:
    """Paths are paths again; the rest has its default."""
    text = command_of({"listen": "127.0.0.1:0", "token_file": Path("/t"), "origins": ["a"]})[-1]
    settings = read_settings(text)
    assert (settings.listen, settings.files.token_file) == ("127.0.0.1:0", Path("/t"))
    assert (settings.origins, settings.channel.token_file) == (("a",), None)
    assert settings.agent_rules
    assert not read_settings(command_of({"agent_rules": False})[-1]).agent_rules
    assert settings.image_urls == ()
    named = read_settings(command_of({"image_urls": ["a.example"]})[-1])
    assert named.image_urls == ("a.example",)


@pytest.mark.parametrize("text", ["{", "[]", '{"lisen": "a"}', '{"listen": 1}', '{"tls_key": 1}'])
def test_anything_else_is_refused(text: str) -> None:
    """Half an object, another name, another type."""
    with pytest.raises(InvalidRequest):
        read_settings(text)
