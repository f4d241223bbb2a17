"""Ollama's answers, made of mlxd's events: lines of a stream, or the whole at once. Pure."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Iterator
from typing import Any

from mlxd import (
    Completion,
    Delta,
    Finished,
    FinishReason,
    Model,
    PositionLogprobs,
    TokenLogprob,
    ToolCall,
)
from mlxd_gateway.common.failures import Failure
from mlxd_gateway.common.responses import write_line
from mlxd_gateway.common.texts import raw_json
from mlxd_gateway.ollama.errors import error_body

Object = dict[str, Any]
_LENGTH = (FinishReason.LENGTH, FinishReason.CONTEXT)


def moment(stamp: dt.datetime | None = None) -> str:
    """Return a moment as the API writes it; None: now."""
    return (stamp or dt.datetime.now(dt.UTC)).isoformat().replace("+00:00", "Z")


def write_call(call: ToolCall) -> Object:
    """Return a call of a tool."""
    function = {"name": call.name, "arguments": raw_json(call.arguments_json)}
    return {"id": call.id, "function": function}


def write_logprobs(positions: Iterable[PositionLogprobs]) -> list[Object]:
    """Return the log-probabilities of tokens."""
    return [
        {**_token(each.chosen), "top_logprobs": [_token(token) for token in each.top]}
        for each in positions
    ]


def _token(token: TokenLogprob) -> Object:
    text = token.text_bytes
    return {
        "token": text.decode(errors="replace"),
        "logprob": token.logprob,
        "bytes": list(text),
    }


class Lines:
    """Lines of one answer; `chat` has them hold messages, else texts."""

    def __init__(self, model: str, *, chat: bool) -> None:
        """Write an answer; `model` is the name that was asked for. Its time begins now."""
        self._model = model
        self._chat = chat
        self._begun_s = time.monotonic()

    def begin(self) -> Iterator[bytes]:
        """Return nothing."""
        yield from ()

    def write(self, event: Delta | Finished) -> Iterator[bytes]:
        """Return the lines of an event."""
        if isinstance(event, Finished):
            yield write_line(self.end(event))
            return
        logprobs = write_logprobs(event.logprobs)
        if not event.parts and (event.text or logprobs):
            yield write_line(self._piece(event.text, logprobs=logprobs))
        for part in event.parts:
            calls = () if part.tool_call is None else (part.tool_call,)
            yield write_line(
                self._piece(part.text, thinking=part.reasoning, calls=calls, logprobs=logprobs)
            )
            logprobs = []

    def fail(self, failure: Failure) -> Iterator[bytes]:
        """Return the line that tells of a failure."""
        yield write_line(error_body(failure))

    def whole(self, done: Completion) -> Object:
        """Return the answer at once."""
        answer = done.message
        piece = self._piece(
            done.text,
            thinking="" if answer is None else answer.reasoning,
            calls=() if answer is None else answer.tool_calls,
            logprobs=write_logprobs(done.logprobs),
        )
        return {**self.end(done.finished), **piece, "done": True}

    def empty(self, reason: str) -> Object:
        """Return the answer to a request without a prompt: its model was loaded or unloaded."""
        return {**self._piece(""), "done": True, "done_reason": reason}

    def end(self, finished: Finished) -> Object:
        """Return the last line."""
        usage = finished.usage
        return {
            **self._piece(""),
            "done": True,
            "done_reason": "length" if finished.reason in _LENGTH else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._begun_s),
            "load_duration": _nanoseconds(usage.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(usage.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.completion_s),
        }

    def _piece(
        self,
        text: str,
        *,
        thinking: str = "",
        calls: Iterable[ToolCall] = (),
        logprobs: Iterable[Object] = (),
    ) -> Object:
        piece: Object = {"model": self._model, "created_at": moment(), "done": False}
        content: Object = {"content": text} if self._chat else {"response": text}
        if thinking:
            content["thinking"] = thinking
        written = [write_call(call) for call in calls]
        if written:
            content["tool_calls"] = written
        if self._chat:
            content = {"message": {"role": "assistant", **content}}
        if logprobs:
            content["logprobs"] = list(logprobs)
        return {**piece, **content}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def details_of(model: Model) -> Object:
    """Return what kind of model it is."""
    family = model.architecture.removesuffix("ForCausalLM").lower()
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": model.weights.value,
    }


def tag_of(model: Model, name: str) -> Object:
    """Return one entry of the list of models."""
    return {
        "name": name,
        "model": name,
        "modified_at": moment(model.last_used_time or dt.datetime.fromtimestamp(0, dt.UTC)),
        "size": model.stored_nbytes,
        "digest": model.digest.removeprefix("sha256:"),
        "details": details_of(model),
    }


def process_of(model: Model) -> Object:
    """Return one entry of the list of models in memory."""
    is_gpu = not model.device.startswith("cpu")
    entry = tag_of(model, model.name)
    del entry["modified_at"]
    return {
        **entry,
        "size": model.resident_nbytes,
        "size_vram": model.resident_nbytes if is_gpu else 0,
        "expires_at": moment(model.expire_time or dt.datetime(9999, 12, 31, tzinfo=dt.UTC)),
        "context_length": model.context_length,
    }


def show_model(model: Model) -> Object:
    """Return what is known of a model."""
    family = details_of(model)["family"]
    return {
        "modelfile": f"# served by mlxd\nFROM {model.name}\n",
        "parameters": "",
        "template": "",
        "details": details_of(model),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": model.context_length_max,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": ["completion", *(["vision"] if model.has_vision else []), "tools"],
        "modified_at": tag_of(model, model.name)["modified_at"],
    }
