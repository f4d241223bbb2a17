"""The requests of Ollama's API: each field once, with what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from mlxd_gateway.common.fates import honour, pass_over, turn_down
from mlxd_gateway.common.texts import ABSENT

NO_SIGHT = "no model here sees: text alone"
AT_LOAD = "chosen when a model is loaded, for all its requests"
NO_SAMPLER = "no model here is sampled so"
NO_PICTURES = "no model here draws"
THINK = "variables of the chat's template: enable_thinking, reasoning_effort"


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """How tokens are drawn."""

    seed: int | None = None
    num_predict: Annotated[int | None, honour("below 1: until the context is full")] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    typical_p: Annotated[float | None, turn_down(NO_SAMPLER, neutral=(1.0,))] = None
    tfs_z: Annotated[float | None, turn_down(NO_SAMPLER, neutral=(1.0,))] = None
    mirostat: Annotated[int | None, turn_down(NO_SAMPLER, neutral=(0,))] = None
    mirostat_tau: Annotated[Any, pass_over("means nothing without mirostat")] = None
    mirostat_eta: Annotated[Any, pass_over("means nothing without mirostat")] = None
    penalize_newline: Annotated[bool | None, turn_down(NO_SAMPLER, neutral=(True,))] = None
    num_ctx: Annotated[Any, pass_over(AT_LOAD)] = None
    num_keep: Annotated[Any, pass_over("no prompt is cut")] = None
    num_batch: Annotated[Any, pass_over(AT_LOAD)] = None
    num_gpu: Annotated[Any, pass_over(AT_LOAD)] = None
    main_gpu: Annotated[Any, pass_over(AT_LOAD)] = None
    num_thread: Annotated[Any, pass_over(AT_LOAD)] = None
    numa: Annotated[Any, pass_over(AT_LOAD)] = None
    low_vram: Annotated[Any, pass_over(AT_LOAD)] = None
    f16_kv: Annotated[Any, pass_over(AT_LOAD)] = None
    logits_all: Annotated[Any, pass_over(AT_LOAD)] = None
    vocab_only: Annotated[bool | None, turn_down("models come whole", neutral=(False,))] = None
    use_mmap: Annotated[Any, pass_over(AT_LOAD)] = None
    use_mlock: Annotated[Any, pass_over(AT_LOAD)] = None
    embedding_only: Annotated[Any, pass_over(AT_LOAD)] = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call."""

    name: str
    arguments: msgspec.Raw
    index: Annotated[Any, pass_over("part of an answer that is sent back")] = None
    description: Annotated[Any, pass_over("models are not shown it")] = None


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant made."""

    function: CalledFunction
    id: str = ""
    type: Annotated[Any, pass_over("there are functions alone")] = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[Any, turn_down(NO_SIGHT, neutral=([],))] = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer."""

    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: Annotated[bool | None, honour("arguments match the parameters")] = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] | None = "function"


class _Generating(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Annotated[msgspec.Raw, honour('"json", or a JSON schema')] = ABSENT
    keep_alive: Annotated[float | str | None, honour("seconds, or such as 5m; -1 for ever")] = None
    think: Annotated[bool | str | None, honour(THINK)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: Annotated[bool | None, turn_down("no prompt is cut", neutral=(False,))] = None
    shift: Annotated[
        bool | None, turn_down("an answer ends where the context does", neutral=(False,))
    ] = None


class ChatRequest(_Generating, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(_Generating, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[str | None, turn_down("no model here fills in", neutral=("",))] = None
    template: Annotated[
        str | None, turn_down("a chat's template is the model's own", neutral=("",))
    ] = None
    context: Annotated[list[int] | None, turn_down("send messages to /api/chat", neutral=([],))] = (
        None
    )
    images: Annotated[Any, turn_down(NO_SIGHT, neutral=([],))] = None
    width: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None
    height: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None
    steps: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None


class EmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    truncate: Annotated[
        bool | None, honour("true is not: a text that is too long is refused in any case")
    ] = None
    options: Annotated[Any, pass_over("nothing is drawn")] = None
    keep_alive: Annotated[Any, pass_over("in force as the last generation said")] = None


class OldEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the older form."""

    model: str
    prompt: str
    options: Annotated[Any, pass_over("nothing is drawn")] = None
    keep_alive: Annotated[Any, pass_over("in force as the last generation said")] = None


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str = ""
    name: Annotated[str, honour("the older name of model")] = ""
    verbose: Annotated[Any, pass_over("nothing is left out")] = None
