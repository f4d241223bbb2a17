"""The agents that `mlxd launch` starts, and how each is pointed at a gateway. Pure.

Invariants:
- A secret is passed in a variable of its own, `KEY` or the tool's; never in an argument or a
  configuration.
- Credentials that the tool would send to another service are removed from its environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

NO_KEY = "mlxd"
"""The key for tools that insist on one when the gateway asks for none."""
KEY = "MLXD_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """What a tool is to talk to.

    `url` is the gateway's, without a path. `model` is empty if the tool is to use its own names;
    `models` are the names available. `ca_file` has the authorities for the gateway's certificate.
    """

    url: str
    model: str = ""
    models: tuple[str, ...] = ()
    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a tool is started with; `key_variable` is where it reads its key."""

    key_variable: str
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """One tool. `own_model` is the name that it requests by default; empty: it has none."""

    program: str
    title: str
    install: str
    own_model: str
    wire: Callable[[Target], Wiring]


def _wire_claude(target: Target) -> Wiring:
    """Claude Code: by the environment alone; every size of model means the named one."""
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        # Keeps the beginning of its prompts the same even if the gateway's rules are off.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    sizes = (
        "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    )  # fmt: skip
    if target.model:
        variables |= dict.fromkeys(sizes, target.model)
    if target.ca_file:
        variables["NODE_EXTRA_CA_CERTS"] = target.ca_file
    return Wiring("ANTHROPIC_AUTH_TOKEN", variables, unset=("ANTHROPIC_API_KEY",))


def _wire_codex(target: Target) -> Wiring:
    """Codex: a provider of its own, by overrides of its configuration, whose values are TOML."""
    provider = "model_providers.mlxd"
    settings = {
        "model_provider": "mlxd",
        f"{provider}.name": "mlxd",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.env_key": KEY,
        f"{provider}.wire_api": "responses",
    }
    if target.model:
        settings["model"] = target.model
    arguments = (part for name, value in settings.items() for part in ("-c", _toml(name, value)))
    variables = {"CODEX_CA_CERTIFICATE": target.ca_file} if target.ca_file else {}
    return Wiring(KEY, variables, arguments=tuple(arguments))


def _toml(name: str, value: str) -> str:
    return f"{name}={json.dumps(value)}"  # a basic string of TOML's is one of JSON's


def _wire_opencode(target: Target) -> Wiring:
    """OpenCode: a configuration in a variable, which it merges with the user's own files."""
    names = dict.fromkeys((target.model, *target.models) if target.model else target.models)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxd",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {name: {"name": name} for name in names},
    }
    content: dict[str, object] = {"provider": {"mlxd": provider}}
    if target.model:
        content["model"] = content["small_model"] = f"mlxd/{target.model}"
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(content)}
    if target.ca_file:
        variables["NODE_EXTRA_CA_CERTS"] = target.ca_file
    return Wiring(KEY, variables)


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "claude", "Claude Code", "https://code.claude.com/docs/en/setup", "claude-sonnet-4-5",
        _wire_claude,
    ),
    "codex": Agent(
        "codex", "Codex", "https://developers.openai.com/codex/cli", "gpt-5-codex", _wire_codex
    ),
    "opencode": Agent("opencode", "OpenCode", "https://opencode.ai/docs", "", _wire_opencode),
}  # fmt: skip


def environment_of(wiring: Wiring, key: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a tool's environment; key: the gateway's, empty if it asks for none."""
    passed = {name: value for name, value in environment.items() if name not in wiring.unset}
    return passed | dict(wiring.variables) | {wiring.key_variable: key or NO_KEY}


def pattern_of(name: str) -> str:
    """Return the alias pattern for a tool's model names, such as `claude-*` for claude-x."""
    return f"{name.partition('-')[0]}-*"


def shell_lines(wiring: Wiring, command: Sequence[str], key: str) -> list[str]:
    """Return shell lines with the same effect.

    key: how the shell writes the key, already quoted.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in wiring.variables.items()]
    return [
        *(f"unset {name}" for name in wiring.unset),
        *exports,
        f"export {wiring.key_variable}={key}",
        shlex.join(command),
    ]
