"""A prompt echoed: its text and ids, and how likely the model finds it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import GenerateSpec
from mlxd_worker.engine.request import PositionLogprobs
from mlxd_worker.front.worker import Worker
from mlxd_worker.thread.facts import Loaded
from mlxd_worker.tokenizing.process import IDS


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt as the model reads it; text and ids are empty unless it is echoed."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Those of each of its tokens from the second on, if requested."""


async def echo_of(
    worker: Worker, spec: GenerateSpec, loaded: Loaded, ids: tuple[int, ...]
) -> PromptEcho | None:
    """Return the echo of a prompt, without log-probabilities yet; None: there is none.

    A resumed stream has sent it already, and so has the first of several choices.

    Raises:
        InvalidRequest: more log-probabilities than one message holds.
    """
    wanted = spec.prompt_logprobs
    if spec.resumed or spec.choice or not (spec.echo or wanted is not None):
        return None
    if wanted is not None and len(ids) * (1 + wanted) > config.PROMPT_LOGPROBS_MAX:
        limit = f"{len(ids)} tokens and {wanted} beside each are more than"
        raise InvalidRequest.of("prompt_logprobs", f"{limit} {config.PROMPT_LOGPROBS_MAX}")
    if not spec.echo:
        return PromptEcho()
    if isinstance(spec.prompt, str):
        return PromptEcho(spec.prompt, ids)
    text = await worker.tokens.decode(
        loaded.tokenizer, array(IDS, ids), skip_special=False, field="echo", kind="generate"
    )
    return PromptEcho(text, ids)
