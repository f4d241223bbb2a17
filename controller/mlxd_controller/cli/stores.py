"""Where stores of models are: what was given, else the environment, else where each store lies.

Invariants:
- An option beats a variable of mlxd's own, which beats those of the store's owner, which beat the
  default. The word `none` leaves a store out.
- What was given and is no directory is refused; a default that is not there is an empty store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxd_controller.cli.configuration.values import LEFT_OUT
from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.settings import DiskBudget, StorePlaces
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.units import format_bytes, parse_bytes
from mlxd_shared.security.disk_key import check_usable

MODELS_DIR_VARIABLE = "MLXD_MODELS_DIR"
HUB_CACHE_VARIABLE = "MLXD_HUB_CACHE"
OLLAMA_VARIABLE = "MLXD_OLLAMA_MODELS"
PREFIX_DISK_FOLDER_DEFAULT = "~/.cache/mlxd/prefixes"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


def _place(help_text: str) -> Any:  # noqa: ANN401 - typer's own
    return typer.Option(metavar="FOLDER|none", help=help_text, show_default=False)


@dataclass(frozen=True, slots=True)
class Stores:
    """The options that say where `mlxd serve` looks for models."""

    models_dir: Annotated[
        str | None,
        _place(
            "mlxd's own directory: one folder per model, and aliases.json."
            f"  [env var: {MODELS_DIR_VARIABLE}]  [default: ~/.local/share/mlxd/models]"
        ),
    ] = None
    hub_cache: Annotated[
        str | None,
        _place(
            "The cache of Hugging Face's libraries, whose models are offered as ORG/NAME."
            f"  [env var: {HUB_CACHE_VARIABLE}, HF_HUB_CACHE, HF_HOME]"
            "  [default: ~/.cache/huggingface/hub]"
        ),
    ] = None
    ollama_models: Annotated[
        str | None,
        _place(
            "Ollama's directory, whose models of tensors are offered as MODEL:TAG."
            f"  [env var: {OLLAMA_VARIABLE}, OLLAMA_MODELS]  [default: ~/.ollama/models]"
        ),
    ] = None

    def places(self, environment: Mapping[str, str]) -> StorePlaces:
        """Return where to look; options that are None were not given.

        Raises:
            typer.Exit: an option names no directory.
        """
        return StorePlaces(
            models_dir=_choose_folder("--models-dir", self.models_dir, models_dir_of(environment)),
            hub_cache=_choose_folder("--hub-cache", self.hub_cache, hub_cache_of(environment)),
            ollama=_choose_folder("--ollama-models", self.ollama_models, ollama_of(environment)),
        )


@dataclass(frozen=True, slots=True)
class KeptPrompts:
    """The options that say what `mlxd serve` keeps on disk of prompts."""

    prefix_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|none",
            help="Disk for parts of prompts that outlive a model, of all models together, such as"
            " 50G. Prompts can be read from what is kept.  [default: none]",
            show_default=False,
        ),
    ] = None
    prefix_disk_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where they are kept, for this user alone."
            f"  [default: {PREFIX_DISK_FOLDER_DEFAULT}]",
            show_default=False,
        ),
    ] = None
    prefix_disk_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Encrypt them with the key in this file: 32 random bytes, in hexadecimal digits or"
            " base64, which only its user may read (0600). What is there in the clear is removed."
            " Needs the extra cipher.  [default: no encryption]",
            show_default=False,
        ),
    ] = None

    def disk_budget(self, environment: Mapping[str, str], *, attached: bool) -> DiskBudget | None:
        """Return what may be kept of prompts on disk; None: nothing.

        attached: workers are others' to start.

        Raises:
            typer.Exit: a size is wrong, or does not go with the workers; or there is a key, and
                nothing is said of a size, or the extra is missing that encrypts.
        """
        if self.prefix_disk is None and self.prefix_disk_key is not None:
            # LEFT_OUT in so many words is no slip: it is how one start keeps nothing.
            usage_error(f"--prefix-disk-key: needs --prefix-disk SIZE, or {LEFT_OUT}")
        text = self.prefix_disk or LEFT_OUT
        if text == LEFT_OUT:
            return None
        try:
            nbytes = parse_bytes(text)
        except ValueError as error:
            usage_error(f"--prefix-disk {text}: {error}")
        if not 0 < nbytes <= config.PREFIX_CACHE_BYTES_LIMIT:
            most = format_bytes(config.PREFIX_CACHE_BYTES_LIMIT)
            usage_error(f"--prefix-disk {text}: more than 0 and at most {most}, or {LEFT_OUT}")
        if attached:
            usage_error(
                "--prefix-disk applies to workers that mlxd starts; set it on those of --worker"
            )
        folder = prefix_folder(self.prefix_disk_folder, environment)
        if self.prefix_disk_key is None:
            return DiskBudget(folder, nbytes)
        try:
            check_usable()
        except InvalidRequest as error:
            usage_error(error.describe())
        return DiskBudget(folder, nbytes, key_file(self.prefix_disk_key))


def models_dir_of(environment: Mapping[str, str]) -> Path | None:
    """Return mlxd's own directory of models; None where it is left out."""
    data = environment.get("XDG_DATA_HOME") or "~/.local/share"
    return _folder(environment.get(MODELS_DIR_VARIABLE) or f"{data}/mlxd/models")


def prefix_folder(path: Path | None, environment: Mapping[str, str]) -> Path:
    """Return where parts of prompts are kept: what was given, or in the user's caches.

    Raises:
        typer.Exit: a user without a home has to name a folder.
    """
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return (path or Path(caches) / "mlxd" / "prefixes").expanduser().absolute()
    except RuntimeError as error:
        usage_error(f"--prefix-disk-folder: {error}")


def key_file(path: Path) -> Path:
    """Return the file of a key as it was given, absolute, for processes that start elsewhere.

    Raises:
        typer.Exit: a user without a home has to say where it is.
    """
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        usage_error(f"--prefix-disk-key: {error}")


def hub_cache_of(environment: Mapping[str, str]) -> Path | None:
    """Return the cache of Hugging Face's libraries, as they find it; None where it is left out.

    They take `~` and variables, such as $SCRATCH, in a path for what these mean.
    """
    path = environment.get(HUB_CACHE_VARIABLE)
    if path:
        return _folder(path)
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    own = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return _folder(_expand(own or f"{home}/hub", environment))


def _expand(path: str, environment: Mapping[str, str]) -> str:
    """Return a path with $NAME and ${NAME} as they are set; what is not set stays as it is."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match[1] or match[2], match[0])

    return _VARIABLE.sub(value, str(Path(path).expanduser()) if path.startswith("~") else path)


def ollama_of(environment: Mapping[str, str]) -> Path | None:
    """Return Ollama's directory of models; None where it is left out."""
    own = environment.get(OLLAMA_VARIABLE) or environment.get("OLLAMA_MODELS")
    return _folder(own or "~/.ollama/models")


def _choose_folder(option: str, text: str | None, default: Path | None) -> Path | None:
    if text is None:
        return default
    folder = _folder(text)
    if folder is not None and not folder.is_dir():
        usage_error(f"{option} {text}: {folder} is not a folder")
    return folder


def _folder(text: str) -> Path | None:
    if text == LEFT_OUT:
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:  # a user without a home has no store there
        return None
