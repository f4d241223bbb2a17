"""What a request asks of a model, in mlxd's words: the one value that every API is translated to.

Invariants:
- A field of mlxd's wire that is wrong is named as the request names it (`rename`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxd import Chat, Client, Delta, Finished, ResponseFormat, SamplingOptions, Stream
from mlxd_gateway.agents.rules import OF_ANY_API, Rule, apply_rules

_PART = re.compile(r"\.parts\[(?P<index>\d+)\]\.(?:image|media_type)")
_PLACE = re.compile(r"chat\.(?P<list>messages|tools_json)\[(?P<index>\d+)\](?P<rest>.*)")

LATEST = "latest"
"""The tag that clients of Ollama's API mean where they say none."""
_HUBS = ("hf.co/", "huggingface.co/")


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation. `fields` are the request's names of fields on mlxd's wire."""

    model: str
    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009 - frozen
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    response_format: ResponseFormat | None = None
    keep_alive_s: float | None = None
    n: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    plain: str | None = None
    """What to continue where the model has no chat template; None: that is refused."""
    fields: Mapping[str, str] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    """The request's field of each message of the chat, or what the wire called it before the rules
    moved it, where `fields` knows more of it."""
    images_at: str = r".content[\g<index>]"
    """How the request names a part of a message that is an image."""
    rules: tuple[Rule, ...] = OF_ANY_API
    """What applies to its chat where rules for agents are in force."""

    def settle(self) -> Ask:
        """Return what is asked by its rules: its chat as they leave it."""
        if not isinstance(self.prompt, Chat):
            return self
        chat, places = apply_rules(self.rules, self.prompt, self.places)
        return replace(self, prompt=chat, places=places)

    def start(self, client: Client, model: str, request_id: str) -> Stream[Delta | Finished]:
        """Begin the generation with a model of this name; a stream survives what it can.

        Raises:
            InvalidRequest: a value that the wire cannot carry.
        """
        return client.generate(
            self.prompt,
            model=model,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
            response_format=self.response_format,
            keep_alive_s=self.keep_alive_s,
            n=self.n,
            echo=self.echo,
            prompt_logprobs=self.prompt_logprobs,
            request_id=request_id,
            reconnect=True,
        )

    def rename(self, field: str) -> str:
        """Return the request's name of a field on mlxd's wire."""
        match = _PLACE.match(field)
        if match is not None and match["list"] == "tools_json":
            return f"tools[{match['index']}]"
        if match is not None and int(match["index"]) < len(self.places):
            rest = _PART.sub(self.images_at, match["rest"])
            field = self.places[int(match["index"])] + rest
            if _PLACE.match(field) is None:
                return field.removesuffix("_json")
        if field in self.fields:
            return self.fields[field]
        for name, own in self.fields.items():
            if field.startswith((f"{name}.", f"{name}[")):
                return own + field.removeprefix(name).removesuffix("_json")
        return field.rpartition(".")[2] if field.startswith("sampling.") else field


def name_candidates(name: str) -> tuple[str, ...]:
    """Return the names under which a model may be known that a client calls `name`.

    Clients of Ollama's API add `:latest` where nothing is said, and leave it out where it is; they
    call a model of Hugging Face's hub `hf.co/ORG/NAME`.
    """
    bare = without_hub(name)
    more = () if bare == name else name_candidates(bare)
    stem, colon, tag = name.rpartition(":")
    if colon and tag == LATEST:
        return (name, stem, *more)
    if not colon or "/" in tag:
        return (name, f"{name}:{LATEST}", *more)
    return (name, *more)


def without_hub(name: str) -> str:
    """Return a name without the hub that Ollama's clients put in front of it."""
    return next((name.removeprefix(hub) for hub in _HUBS if name.startswith(hub)), name)
