"""The configuration file as it is read: where it is, what it may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.cli.configuration.keys import KEYS
from mlxd_controller.cli.configuration.reading import Configuration, find_path, load_configuration
from mlxd_shared.config import CONFIGURATION_BYTES_MAX

HOME = Path.home()
WHOLE = """
address = "127.0.0.1:9"
token_file = "token"
[limits]
keep_alive = 90
memory_limit = "12G"
waiting_max = 3
[server]
allow_remote = true
preload = ["a", "b c"]
keys_file = "/k"
[stores]
hub_cache = "none"
[models."org/m"]
context = 4096
"""


def read(tmp_path: Path, text: str) -> Configuration:
    """Read a file of this text."""
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return load_configuration({"MLXD_CONFIG": str(path)})


def test_a_file_lies_where_it_is_said_to() -> None:
    """`$MLXD_CONFIG`, else XDG's folder, else the user's own; `none` is none."""
    assert find_path({}) == HOME / ".config/mlxd/config.toml"
    assert find_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mlxd/config.toml")
    assert find_path({"XDG_CONFIG_HOME": "relative"}) == HOME / ".config/mlxd/config.toml"
    assert find_path({"XDG_CONFIG_HOME": "/x", "MLXD_CONFIG": "~/c"}) == HOME / "c"
    assert find_path({"MLXD_CONFIG": "none"}) is None


def test_no_file_is_no_mistake_unless_it_was_named(tmp_path: Path) -> None:
    """An empty configuration; a path that somebody wrote is meant."""
    none = load_configuration({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (none.problem, none.values, none.models) == ("", {}, {})
    missing = load_configuration({"MLXD_CONFIG": str(tmp_path / "c")})
    assert missing.problem == f"MLXD_CONFIG: {tmp_path}/c: there is no such file"


def test_values_become_defaults_of_options(tmp_path: Path) -> None:
    """Of those before the command and of commands; paths are relative to the file's folder."""
    configuration = read(tmp_path, WHOLE)
    assert configuration.problem == ""
    keys = {"keys_file": "/k"}
    assert configuration.defaults() == {
        "address": "127.0.0.1:9",
        "token_file": str(tmp_path / "token"),
        "doctor": keys,
        "keys": {"add": keys, "list": keys, "remove": keys},
        "serve": {
            "allow_remote": True, "preload": ["a", "b c"], "memory_limit": "12G",
            "waiting_max": 3, **keys,
        },
    }  # fmt: skip
    assert configuration.models == {"org/m": {"context": 4096}}


def test_variables_that_are_read_elsewhere_are_set_unless_they_are(tmp_path: Path) -> None:
    """What the environment says goes before the file; an empty variable says nothing."""
    configuration = read(tmp_path, WHOLE)
    empty = {"MLXD_HUB_CACHE": ""}
    configuration.fill_environment(empty)
    assert empty == {"MLXD_HUB_CACHE": "none", "MLXD_KEEP_ALIVE": "90"}
    said = {"MLXD_KEEP_ALIVE": "7", "MLXD_HUB_CACHE": "/h"}
    configuration.fill_environment(said)
    assert said == {"MLXD_KEEP_ALIVE": "7", "MLXD_HUB_CACHE": "/h"}


REFUSED = [
    ("adress = 'x:1'", "adress: there is no such key; did you mean address?"),
    ("[limits]\nkeepalive = 3", "limits.keepalive: there is no such key; did you mean limits.kee"),
    ("[models.m]\ncontxt = 3", 'models."m".contxt: there is no such key; did you mean models."m"'),
    ("token = 'x'", "token: a token is in a file of its own: name that with token_file"),
    ("limits = 3", "limits: is a table: write [limits]"),
    ("[models]\nm = 3", 'models."m": is a table: write [models."m"]'),
    ("address = 3", "address: 3 is not HOST:PORT or unix:PATH"),
    ("address = 'nonsense'", "address: 'nonsense' is not"),
    ("[server]\nallow_remote = 'yes'", "server.allow_remote: 'yes' is not true or false"),
    ("[server]\npreload = 'a'", "server.preload: 'a' is not a list of texts"),
    ("[server]\npreload = [1]", "server.preload: 1 is not a list of texts"),
    ("[server]\norphan_grace = '2h'", "server.orphan_grace: '2h' is above 1h00m"),
    ("[limits]\nkeep_alive = 'soon'", "limits.keep_alive: 'soon' is not a duration"),
    ("[limits]\nkeep_alive = true", "limits.keep_alive: True is not a duration"),
    ("[limits]\nmemory_limit = 'much'", "limits.memory_limit: 'much' is not a size"),
    ("[limits]\nmemory_limit = -1", "limits.memory_limit: '-1' is not a size"),
    ("[limits]\nreserve = '100%'", "limits.reserve: '100%' is not a size such as"),
    ("[limits]\nmax_loaded = 0", "limits.max_loaded: 0 is below 1"),
    ("[limits]\nmax_loaded = true", "limits.max_loaded: True is not a whole number"),
    ("[limits]\nwaiting_max = 65537", "limits.waiting_max: 65537 is above 65536"),
    ("[log]\nlevel = 'loud'", "log.level: 'loud' is not one of debug, info, warning, error"),
    ("[models.m]\nweights = 'int3'", "models.\"m\".weights: 'int3' is not one of auto, stored"),
    ("[models.m]\ntemperature = '1'", "models.\"m\".temperature: '1' is not a number"),
    ("[client]\ntls_ca = ''", "client.tls_ca: '' is not a path"),
    ("[client]\ntls_ca = '~nobody-of-this-name/ca'", "client.tls_ca: '~nobody-of-this-name/ca'"),
    ("a = ", "is not TOML: "),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_what_is_wrong_is_refused_by_file_and_key(tmp_path: Path, text: str, problem: str) -> None:
    """Nothing of the file is in force then."""
    refused = read(tmp_path, text)
    assert refused.problem.startswith(f"{tmp_path}/c.toml: {problem}")
    assert (refused.values, refused.models, refused.defaults()) == ({}, {}, {})


@pytest.mark.parametrize(("mode", "loose"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int, *, loose: bool) -> None:
    """The file and the key are named, and what to do."""
    token = tmp_path / "token"
    token.touch()
    token.chmod(mode)
    problem = read(tmp_path, "token_file = 'token'").problem
    assert (problem != "") is loose
    if loose:
        assert problem.startswith(f"{tmp_path}/c.toml: token_file: {token} is open to others")
        assert problem.endswith(f"(mode 0644): chmod 600 {token}")


def test_a_file_is_bounded_and_is_text(tmp_path: Path) -> None:
    """No more than the bound is read; bytes that are no text, and folders, are refused."""
    large = read(tmp_path, "#" * (CONFIGURATION_BYTES_MAX + 1)).problem
    assert large == f"{tmp_path}/c.toml: at most {CONFIGURATION_BYTES_MAX} bytes are read"
    (tmp_path / "c.toml").write_bytes(b"\xff")
    assert "is not TOML" in load_configuration({"MLXD_CONFIG": f"{tmp_path}/c.toml"}).problem
    assert "cannot be read: " in load_configuration({"MLXD_CONFIG": str(tmp_path)}).problem


def test_variables_that_are_set_are_known(tmp_path: Path) -> None:
    """Those of keys alone, and none that is empty."""
    said = {
        "MLXD_ADDRESS": "x:1",
        "MLXD_TLS_CA": "",
        "HOME": "/h",
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    assert load_configuration(said).variables == {"MLXD_ADDRESS": "x:1"}
    assert {key.variable for key in KEYS} >= {"MLXD_ADDRESS", "MLXD_TLS_CA"}
