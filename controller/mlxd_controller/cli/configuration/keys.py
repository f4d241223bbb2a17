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
from mlxd_shared.domain.requests import KVFormat, Weights
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


def _serve(
    name: str, kind: Kind, option: str = "", *, default: str = "", low: int | None = None,
    high: int | None = None, choices: tuple[str, ...] = (), variable: str = "",
) -> Key:  # fmt: skip
    """Return a key for an option of `mlxd serve`, by default one of the key's own name."""
    option = option or name.rpartition(".")[2]
    return Key(
        name, variable or f"MLXD_{option.upper()}", kind, (f"serve.{option}",),
        default=default, low=low, high=high, choices=choices,
    )  # fmt: skip


def _variable(name: str, kind: Kind, default: str) -> Key:
    """Return a key whose variable is read by the code that knows all places of its value."""
    option = name.rpartition(".")[2]
    return Key(name, f"MLXD_{option.upper()}", kind, help_of=f"serve.{option}", default=default)


def _client(name: str, kind: Kind, default: str = "") -> Key:
    """Return a key for an option that stands before the command."""
    option = name.rpartition(".")[2]
    return Key(name, f"MLXD_{option.upper()}", kind, (option,), default=default)


_CACHE_COMMANDS = ("serve", "cache.list", "cache.size", "cache.drop", "cache.verify")
_KEYS_COMMANDS = ("serve", "doctor", "keys.add", "keys.list", "keys.remove")
_STARTING_COMMANDS = ("run", "load", "generate", "embed", "score", "tokenize")
KEYS: Final[tuple[Key, ...]] = (
    _client("address", Kind.ADDRESS, config.DEFAULT_ADDRESS),
    _client("token_file", Kind.SECRET),
    _client("client.tls_ca", Kind.FILE),
    _client("client.tls_cert", Kind.FILE),
    _client("client.tls_key", Kind.FILE),
    Key(
        "client.http_url", "MLXD_HTTP_URL", Kind.TEXT, ("launch.url",),
        default=f"http://{config.DEFAULT_HTTP_ADDRESS}",
    ),
    Key(
        "client.start", "MLXD_START", Kind.FLAG,
        tuple(f"{command}.start" for command in _STARTING_COMMANDS), default="true",
    ),
    Key(
        "client.history", "MLXD_HISTORY", Kind.STORE, ("run.history",),
        default="~/.local/state/mlxd/chat_history",
    ),
    _serve("server.tls_cert", Kind.FILE, variable="MLXD_SERVER_TLS_CERT"),
    _serve("server.tls_key", Kind.FILE, variable="MLXD_SERVER_TLS_KEY"),
    _serve("server.tls_client_ca", Kind.FILE, variable="MLXD_SERVER_TLS_CLIENT_CA"),
    Key(
        "server.keys_file", "MLXD_KEYS_FILE", Kind.FILE,
        tuple(f"{command}.keys_file" for command in _KEYS_COMMANDS),
    ),
    _serve("server.open_health", Kind.FLAG, default="false"),
    _serve("server.allow_remote", Kind.FLAG, default="false"),
    _serve("server.preload", Kind.TEXTS, default="[]"),
    _serve("server.run_dir", Kind.FILE, default="by the address, in $XDG_RUNTIME_DIR/mlxd or /tmp"),
    _serve(
        "server.orphan_grace", Kind.DURATION, default=format_duration(config.ORPHAN_GRACE_S),
        high=int(config.LOAD_TOTAL_TIMEOUT_S),
    ),
    _variable("stores.models_dir", Kind.STORE, "~/.local/share/mlxd/models"),
    _variable("stores.hub_cache", Kind.STORE, "~/.cache/huggingface/hub"),
    _variable("stores.ollama_models", Kind.STORE, "~/.ollama/models"),
    _serve("stores.prefix_disk", Kind.SIZE_OR_NONE, default="none"),
    Key(
        "stores.prefix_disk_folder", "MLXD_PREFIX_DISK_FOLDER", Kind.FILE,
        tuple(f"{command}.prefix_disk_folder" for command in _CACHE_COMMANDS),
        default="~/.cache/mlxd/prefixes",
    ),
    _serve("limits.memory_limit", Kind.SIZE, default="what the device has"),
    _serve("limits.reserve", Kind.SHARE, default=f"{config.MEMORY_RESERVE_FRACTION:.0%}"),
    _serve("limits.gpu_overhead", Kind.SHARE, default="0"),
    _variable("limits.keep_alive", Kind.DURATION, format_duration(config.KEEP_ALIVE_DEFAULT_S)),
    _serve("limits.max_loaded", Kind.WHOLE, default="what fits", low=1),
    _serve(
        "limits.waiting_max", Kind.WHOLE, default=str(config.WAITING_STREAMS_MAX), low=0,
        high=config.WAITING_STREAMS_LIMIT,
    ),
    _variable("limits.load_timeout", Kind.DURATION, format_duration(config.LOAD_STALL_TIMEOUT_S)),
    _serve(
        "limits.worker_silent_timeout", Kind.DURATION,
        default=format_duration(config.WORKER_SILENT_MAX_S),
    ),
    _serve("http.listen", Kind.ADDRESS, "http", default="no HTTP"),
    _serve("http.origins", Kind.TEXTS, "http_origin", default="[]"),
    _serve("http.no_agent_rules", Kind.FLAG, default="false"),
    _serve("router.listen", Kind.ADDRESS, "router", default="no door for a router"),
    _serve("router.models", Kind.TEXTS, "router_model", default="[]"),
    _serve("router.networks", Kind.TEXTS, "router_network", default="[]"),
    _serve("router.manifest", Kind.FILE, "router_manifest", default="no file"),
    _serve("metrics.listen", Kind.ADDRESS, "metrics", default="no metrics"),
    _serve("metrics.vllm_aliases", Kind.FLAG, "metrics_vllm_aliases", default="false"),
    _serve("workers.attach", Kind.TEXTS, "worker", default="[]"),
    _serve("workers.tls_ca", Kind.FILE, "worker_tls_ca"),
    _serve("workers.tls_cert", Kind.FILE, "worker_tls_cert"),
    _serve("workers.tls_key", Kind.FILE, "worker_tls_key"),
    _serve("workers.token_file", Kind.SECRET, "worker_token_file"),
    _serve("log.level", Kind.TEXT, "log_level", default="info", choices=tuple(LEVELS)),
    _serve(
        "log.format", Kind.TEXT, "log_format", default="auto", choices=("auto", "json", "console")
    ),
    _serve("log.content", Kind.FLAG, "log_content", default="false"),
)  # fmt: skip
"""Every key outside of `[models."NAME"]`, in the order in which people are shown them."""

_SAMPLING_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "xtc_probability", "xtc_threshold",
)  # fmt: skip
_WHOLE_NUMBERS = ("context", "rows", "priority", "top_k", "repeat_last_n", "seed")
MODELS: Final = "models"
"""The table of tables, by the models' names."""
_MODEL_KEYS = {
    "path": Key("path", "", Kind.FILE),
    "weights": Key("weights", "", Kind.TEXT, choices=tuple(each.value for each in Weights)),
    "kv_format": Key("kv_format", "", Kind.TEXT, choices=tuple(each.value for each in KVFormat)),
    "prefix_cache": Key("prefix_cache", "", Kind.SIZE),
    "keep_alive": Key("keep_alive", "", Kind.DURATION),
    "pin": Key("pin", "", Kind.FLAG),
    **{name: Key(name, "", Kind.WHOLE) for name in _WHOLE_NUMBERS},
    **{name: Key(name, "", Kind.NUMBER) for name in _SAMPLING_NUMBERS},
    "logit_bias": Key("logit_bias", "", Kind.TEXTS),
}
MODEL_KEYS: Final[Mapping[str, Key]] = MappingProxyType(_MODEL_KEYS)
"""What a load of one model begins with: the options of `mlxd load`, and where its folder is."""


def variables_of(command: str) -> dict[str, str]:
    """Return the variables of a command's parameters, by the parameters' names."""
    return {
        parameter: key.variable
        for key in KEYS
        for owner, _, parameter in (option.rpartition(".") for option in key.options)
        if owner == command
    }
