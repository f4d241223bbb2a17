"""The keys of the configuration file: each with its variable, its kind and its options.

Invariants:
- A key has one variable, and a variable one key. A flag beats the variable, the variable the file,
  the file the default; the command line's own library sees to that (`default_map`, `envvar`).
- Keys of models have no variables: a variable cannot name a model.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.requests import SAMPLING_RANGES, WHOLE_OPTIONS, KVFormat, Weights
from mlxd_shared.domain.units import format_duration
from mlxd_shared.ops.logs import LEVELS


class Kind(enum.Enum):
    """What a key takes, in the words of a refusal."""

    TEXT = "a text"
    TEXTS = "a list of texts"
    FLAG = "true or false"
    WHOLE = "a whole number"
    NUMBER = "a number"
    DURATION = 'a duration, such as "5m", or seconds'
    SIZE = 'a size, such as "12G", or bytes'
    SHARE = 'a size such as "2G", or a share from "0%" to "99%"'
    ADDRESS = "HOST:PORT or unix:PATH"
    FILE = "a path"
    SECRET = "the path of a file that only its owner may read"  # noqa: S105 - words
    SIZE_OR_NONE = 'a size, such as "50G", or "none"'
    STORE = 'a path, or "none"'


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `options` are parameters: COMMAND.NAME, or NAME before the command."""

    name: str
    variable: str
    kind: Kind
    options: tuple[str, ...] = ()
    """Without any, the code that reads the variable knows more places: the file sets it."""
    help_of: str = ""
    """Of the option that has the help; absent: the first of `options`."""
    default: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()


def _key(
    name: str, kind: Kind, *options: str, variable: str = "", default: str = "",
    low: int | None = None, high: int | None = None, choices: tuple[str, ...] = (),
) -> Key:  # fmt: skip
    """Return a key; without options, of the one of `mlxd serve` that has the key's own name.

    Its variable is called after the first option.
    """
    options = options or (f"serve.{name.rpartition('.')[2]}",)
    variable = variable or f"MLXD_{options[0].rpartition('.')[2].upper()}"
    return Key(name, variable, kind, options, default=default, low=low, high=high, choices=choices)


def _variable(name: str, kind: Kind, default: str) -> Key:
    """Return a key whose variable is read by the code that knows all places of its value."""
    option = name.rpartition(".")[2]
    return Key(name, f"MLXD_{option.upper()}", kind, help_of=f"serve.{option}", default=default)


_CACHE_COMMANDS = ("serve", "cache.list", "cache.size", "cache.drop", "cache.verify")
_KEYS_COMMANDS = ("serve", "doctor", "keys.add", "keys.list", "keys.remove")
_STARTING_COMMANDS = ("run", "load", "generate", "embed", "score", "tokenize")
KEYS: Final[tuple[Key, ...]] = (
    _key("address", Kind.ADDRESS, "address", default=config.DEFAULT_ADDRESS),
    _key("token_file", Kind.SECRET, "token_file"),
    _key("client.tls_ca", Kind.FILE, "tls_ca"),
    _key("client.tls_cert", Kind.FILE, "tls_cert"),
    _key("client.tls_key", Kind.FILE, "tls_key"),
    _key(
        "client.http_url", Kind.TEXT, "launch.url", variable="MLXD_HTTP_URL",
        default=f"http://{config.DEFAULT_HTTP_ADDRESS}",
    ),
    _key(
        "client.start", Kind.FLAG, *(f"{command}.start" for command in _STARTING_COMMANDS),
        default="true",
    ),
    _key(
        "client.history", Kind.STORE, "run.history", default="~/.local/state/mlxd/chat_history"
    ),
    _key("server.tls_cert", Kind.FILE, variable="MLXD_SERVER_TLS_CERT"),
    _key("server.tls_key", Kind.FILE, variable="MLXD_SERVER_TLS_KEY"),
    _key("server.tls_client_ca", Kind.FILE, variable="MLXD_SERVER_TLS_CLIENT_CA"),
    _key(
        "server.keys_file", Kind.FILE, *(f"{command}.keys_file" for command in _KEYS_COMMANDS)
    ),
    _key("server.open_health", Kind.FLAG, default="false"),
    _key("server.allow_remote", Kind.FLAG, default="false"),
    _key("server.preload", Kind.TEXTS, default="[]"),
    _key("server.run_dir", Kind.FILE, default="by the address, in $XDG_RUNTIME_DIR/mlxd or /tmp"),
    _key(
        "server.orphan_grace", Kind.DURATION, default=format_duration(config.ORPHAN_GRACE_S),
        high=int(config.LOAD_TOTAL_TIMEOUT_S),
    ),
    _variable("stores.models_dir", Kind.STORE, "~/.local/share/mlxd/models"),
    _variable("stores.hub_cache", Kind.STORE, "~/.cache/huggingface/hub"),
    _variable("stores.ollama_models", Kind.STORE, "~/.ollama/models"),
    _key("stores.prefix_disk", Kind.SIZE_OR_NONE, default="none"),
    _key(
        "stores.prefix_disk_folder", Kind.FILE,
        *(f"{command}.prefix_disk_folder" for command in _CACHE_COMMANDS),
        default="~/.cache/mlxd/prefixes",
    ),
    _key(
        "stores.prefix_disk_key", Kind.SECRET, "serve.prefix_disk_key",
        "cache.verify.prefix_disk_key", default="no encryption",
    ),
    _key("limits.memory_limit", Kind.SIZE, default="what the device has"),
    _key("limits.reserve", Kind.SHARE, default=f"{config.MEMORY_RESERVE_FRACTION:.0%}"),
    _key("limits.gpu_overhead", Kind.SHARE, default="0"),
    _variable("limits.keep_alive", Kind.DURATION, format_duration(config.KEEP_ALIVE_DEFAULT_S)),
    _key("limits.max_loaded", Kind.WHOLE, default="what fits", low=1),
    _key(
        "limits.waiting_max", Kind.WHOLE, default=str(config.WAITING_STREAMS_MAX), low=0,
        high=config.WAITING_STREAMS_LIMIT,
    ),
    _variable("limits.load_timeout", Kind.DURATION, format_duration(config.LOAD_STALL_TIMEOUT_S)),
    _key(
        "limits.worker_silent_timeout", Kind.DURATION,
        default=format_duration(config.WORKER_SILENT_MAX_S),
    ),
    _key("http.listen", Kind.ADDRESS, "serve.http", default="no HTTP"),
    _key("http.origins", Kind.TEXTS, "serve.http_origin", default="[]"),
    _key("http.no_agent_rules", Kind.FLAG, default="false"),
    _key("http.image_urls", Kind.TEXTS, default="[]"),
    _key("router.listen", Kind.ADDRESS, "serve.router", default="no door for a router"),
    _key("router.models", Kind.TEXTS, "serve.router_model", default="[]"),
    _key("router.networks", Kind.TEXTS, "serve.router_network", default="[]"),
    _key("router.manifest", Kind.FILE, "serve.router_manifest", default="no file"),
    _key("fleet.address", Kind.TEXT, "serve.fleet", default="workers on this machine"),
    _key("fleet.tls", Kind.FILE, "serve.fleet_tls"),
    _key("metrics.listen", Kind.ADDRESS, "serve.metrics", default="no metrics"),
    _key("metrics.vllm_aliases", Kind.FLAG, "serve.metrics_vllm_aliases", default="false"),
    _key("workers.attach", Kind.TEXTS, "serve.worker", default="[]"),
    _key("workers.tls_ca", Kind.FILE, "serve.worker_tls_ca"),
    _key("workers.tls_cert", Kind.FILE, "serve.worker_tls_cert"),
    _key("workers.tls_key", Kind.FILE, "serve.worker_tls_key"),
    _key("workers.token_file", Kind.SECRET, "serve.worker_token_file"),
    _key("log.level", Kind.TEXT, "serve.log_level", default="info", choices=tuple(LEVELS)),
    _key(
        "log.format", Kind.TEXT, "serve.log_format", default="auto",
        choices=("auto", "json", "console"),
    ),
    _key("log.content", Kind.FLAG, "serve.log_content", default="false"),
)  # fmt: skip
"""Every key outside of `[models."NAME"]`, in the order in which people are shown them."""

MODELS: Final = "models"
"""The table of tables, by the models' names."""
_OF_MODELS = (
    Key("path", "", Kind.FILE),
    Key("weights", "", Kind.TEXT, choices=tuple(each.value for each in Weights)),
    Key("kv_format", "", Kind.TEXT, choices=tuple(each.value for each in KVFormat)),
    Key("prefix_cache", "", Kind.SIZE),
    Key("keep_alive", "", Kind.DURATION),
    Key("pin", "", Kind.FLAG),
    *(Key(name, "", Kind.WHOLE) for name in ("context", "rows", "priority", "ranks")),
    *(
        Key(name, "", Kind.WHOLE if name in WHOLE_OPTIONS else Kind.NUMBER)
        for name in SAMPLING_RANGES
    ),
    Key("logit_bias", "", Kind.TEXTS),
)
MODEL_KEYS: Final[Mapping[str, Key]] = MappingProxyType({key.name: key for key in _OF_MODELS})
"""What a load of one model begins with: the options of `mlxd load`, and where its folder is."""


def variables_of(command: str) -> dict[str, str]:
    """Return the variables of a command's parameters, by the parameters' names."""
    return {
        parameter: key.variable
        for key in KEYS
        for owner, _, parameter in (option.rpartition(".") for option in key.options)
        if owner == command
    }
