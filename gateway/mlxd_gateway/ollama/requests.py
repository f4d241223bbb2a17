"""The requests of Ollama's API: each field once, with what becomes of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, Stops, honour, pass_over, turn_down
from mlxd_shared import config

AT_LOAD = "chosen when a model is loaded, for all its requests"
NO_SAMPLER = "no model here is sampled so"
NO_PICTURES = "no model here draws"
DURATION_CHARS_MAX = 32
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
    stop: str | Stops | None = None
    typical_p: Annotated[float | None, turn_down(NO_SAMPLER, neutral=(1.0,))] = None
    tfs_z: Annotated[float | None, turn_down(NO_SAMPLER, neutral=(1.0,))] = None
    mirostat: Annotated[int | None, turn_down(NO_SAMPLER, neutral=(0,))] = None
    mirostat_tau: Annotated[Raw, pass_over("means nothing without mirostat")] = ABSENT
    mirostat_eta: Annotated[Raw, pass_over("means nothing without mirostat")] = ABSENT
    penalize_newline: Annotated[bool | None, turn_down(NO_SAMPLER, neutral=(True,))] = None
    num_ctx: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    num_keep: Annotated[Raw, pass_over("no prompt is cut")] = ABSENT
    num_batch: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    num_gpu: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    main_gpu: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    num_thread: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    numa: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    low_vram: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    f16_kv: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    logits_all: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    vocab_only: Annotated[bool | None, turn_down("models come whole", neutral=(False,))] = None
    use_mmap: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    use_mlock: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT
    embedding_only: Annotated[Raw, pass_over(AT_LOAD)] = ABSENT


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call."""

    name: str
    arguments: Raw
    index: Annotated[Raw, pass_over("part of an answer that is sent back")] = ABSENT
    description: Annotated[Raw, pass_over("models are not shown it")] = ABSENT


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant made."""

    function: CalledFunction
    id: str = ""
    type: Annotated[Raw, pass_over("there are functions alone")] = ABSENT


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[str] | None, honour("base64; of a user or a tool")] = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer."""

    name: str | None = None
    description: str | None = None
    parameters: Raw = ABSENT
    strict: Annotated[bool | None, honour("arguments match the parameters")] = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] | None = "function"


class _Generating(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Annotated[Raw, honour('"json", or a JSON schema')] = ABSENT
    keep_alive: Annotated[
        float | Annotated[str, msgspec.Meta(max_length=DURATION_CHARS_MAX)] | None,
        honour("seconds, or such as 5m; -1 for ever"),
    ] = None
    think: Annotated[bool | str | None, honour(THINK)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: Annotated[bool | None, turn_down("no prompt is cut", neutral=(False,))] = None
    shift: Annotated[
        bool | None, turn_down("an answer ends where the context does", neutral=(False,))
    ] = None


class ChatRequest(_Generating, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[Message], msgspec.Meta(max_length=config.CHAT_MESSAGES_MAX)] | None = (
        None
    )
    tools: Annotated[list[Tool], msgspec.Meta(max_length=config.CHAT_TOOLS_MAX)] | None = None


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
    images: Annotated[list[str] | None, honour("base64; of a user or a tool")] = None
    width: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None
    height: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None
    steps: Annotated[int | None, turn_down(NO_PICTURES, neutral=(0,))] = None


class EmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str
    input: str | Annotated[list[str], msgspec.Meta(max_length=config.EMBED_TEXTS_MAX)]
    dimensions: int | None = None
    truncate: Annotated[
        bool | None, honour("true is not: a text that is too long is refused in any case")
    ] = None
    options: Annotated[Raw, pass_over("nothing is drawn")] = ABSENT
    keep_alive: Annotated[Raw, pass_over("in force as the last generation said")] = ABSENT


class OldEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the older form."""

    model: str
    prompt: str
    options: Annotated[Raw, pass_over("nothing is drawn")] = ABSENT
    keep_alive: Annotated[Raw, pass_over("in force as the last generation said")] = ABSENT


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str = ""
    name: Annotated[str, honour("the older name of model")] = ""
    verbose: Annotated[Raw, pass_over("nothing is left out")] = ABSENT


class PullRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/pull."""

    model: Annotated[str, honour("ORG/NAME[@REVISION] on Hugging Face's hub")] = ""
    name: Annotated[str, honour("the older name of model")] = ""
    stream: bool | None = None
    insecure: Annotated[
        bool | None, turn_down("whom a hub's certificate is from is checked", neutral=(False,))
    ] = None
    username: Annotated[str | None, turn_down("the server's own token is sent", neutral=("",))] = (
        None
    )
    password: Annotated[str | None, turn_down("the server's own token is sent", neutral=("",))] = (
        None
    )
