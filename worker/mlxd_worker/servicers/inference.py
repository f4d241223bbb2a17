"""InferenceService of a worker.

Invariants:
- Nothing that takes long runs on the event loop: texts are tokenised in a room of their own, and
  what is as long is read and written on threads, a part at a time.
- A handler never swallows its cancellation.
"""

# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from mlxd.v1 import inference_pb2, score_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest
from mlxd_shared.wire.convert import FINISH_TO_PB, generate_from_pb
from mlxd_shared.wire.convert_bounds import check_ids, text_of
from mlxd_shared.wire.convert_embed import embed_from_pb
from mlxd_shared.wire.convert_score import score_from_pb
from mlxd_shared.wire.intake import is_checked, run_paced
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.records import duration_to_pb, write
from mlxd_worker.chat.answer import PartPiece
from mlxd_worker.engine.request import Finished, PositionLogprobs, TokenLogprob, Usage
from mlxd_worker.front.embedding import embed
from mlxd_worker.front.generation import Part, PromptEcho, generate
from mlxd_worker.front.prompting import check_length
from mlxd_worker.front.scoring import score
from mlxd_worker.front.worker import Worker
from mlxd_worker.servicers.metrics import WorkerMetrics
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import IDS

IDS_AT_ONCE: Final = 1 << 14
"""How many ids are read or written before other threads get the interpreter: a few ms."""


class InferenceServicer:
    """Generation and tokenisation with the worker's model."""

    def __init__(self, worker: Worker, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._metrics = metrics

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream one completion."""
        with self._metrics.request(self._worker.model_name) as record:
            spec = await run_paced(generate_from_pb, request, is_checked=is_checked())
            self._worker.check_incarnation(spec.worker_incarnation)
            if spec.choices > 1:
                raise FieldNotServed("n above 1 by a worker, without a controller,")
            loaded = self._worker.admit(spec.model)
            left_s = context.time_remaining()
            async with aclosing(generate(self._worker, spec, loaded, left_s=left_s)) as parts:
                async for part in parts:
                    record.note(part.event)
                    message = part_to_pb(part, load_s=spec.load_s, choice=spec.choice)
                    tokenizer = loaded.tokenizer
                    message.logprobs.extend(logprobs_to_pb(part.event.logprobs, tokenizer))
                    if part.prompt is not None:
                        message.prompt.CopyFrom(echo_to_pb(part.prompt, tokenizer))
                    yield message

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> bytes:
        """Return the ids of a text, as a message's bytes: there may be millions."""
        self._worker.check_incarnation(request.worker_incarnation)
        loaded = self._worker.check_model(request.model)
        text = await run_paced(text_of, request)
        check_length(len(text), loaded, field="text")
        add_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        ids = await self._worker.tokens.encode(
            loaded.tokenizer,
            text,
            field="text",
            kind="tokenize",
            begin_text=add_special,
            parse_special=request.parse_special_tokens,
        )
        if len(ids) > config.TOKENIZE_IDS_MAX:
            limit = f"it has {len(ids)} tokens; at most {config.TOKENIZE_IDS_MAX}"
            raise InvalidRequest.of("text", limit)
        return await asyncio.to_thread(ids_to_bytes, ids, digest=loaded.job.digest)

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Context) -> bytes:
        """Return the text of ids."""
        self._worker.check_incarnation(request.worker_incarnation)
        loaded = self._worker.check_model(request.model)
        check_ids(request)
        ids = await run_paced(ids_of, request.token_ids, vocab_size=loaded.vocab_size)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        text = await self._worker.tokens.decode(
            loaded.tokenizer, ids, skip_special=skip, field="token_ids", kind="detokenize"
        )
        if len(text) <= config.INLINE_REQUEST_BYTES_MAX:
            return text_to_bytes(text, digest=loaded.job.digest)
        return await asyncio.to_thread(text_to_bytes, text, digest=loaded.job.digest)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Return the vectors of texts."""
        spec = await run_paced(embed_from_pb, request, is_checked=is_checked())
        self._worker.check_incarnation(spec.worker_incarnation)
        loaded = self._worker.admit(spec.model)
        left_s = context.time_remaining()
        vectors, prompt_tokens = await embed(self._worker, spec, loaded, left_s=left_s)
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=vector) for vector in vectors],
            prompt_tokens=prompt_tokens,
            model_digest=loaded.job.digest,
        )

    async def Score(
        self, request: score_pb2.ScoreRequest, context: Context
    ) -> score_pb2.ScoreResponse:
        """Return how likely the model finds continuations."""
        spec = await run_paced(score_from_pb, request, is_checked=is_checked())
        self._worker.check_incarnation(spec.worker_incarnation)
        loaded = self._worker.admit(spec.model)
        left_s = context.time_remaining()
        scores, prompt_tokens = await score(self._worker, spec, loaded, left_s=left_s)
        return score_pb2.ScoreResponse(
            scores=[write(each, score_pb2.Score) for each in scores],
            prompt_tokens=prompt_tokens,
            model_digest=loaded.job.digest,
        )


def text_to_bytes(text: str, *, digest: str) -> bytes:
    """Return a DetokenizeResponse as it goes on the wire."""
    message = inference_pb2.DetokenizeResponse(text=text, model_digest=digest)
    return message.SerializeToString()


def ids_to_bytes(ids: array[int], *, digest: str) -> bytes:
    """Return a TokenizeResponse as it goes on the wire.

    It is made in parts, between which other threads get the interpreter: concatenated messages are
    one message, whose lists are joined.
    """
    parts = [inference_pb2.TokenizeResponse(model_digest=digest).SerializeToString()]
    for begin in range(0, len(ids), IDS_AT_ONCE):
        some = ids[begin : begin + IDS_AT_ONCE]
        parts.append(inference_pb2.TokenizeResponse(token_ids=some).SerializeToString())
    return b"".join(parts)


def ids_of(numbers: Sequence[int], *, vocab_size: int) -> array[int]:
    """Return the ids of a request, read a part at a time; InvalidRequest if the model lacks one."""
    ids = array(IDS)
    for begin in range(0, len(numbers), IDS_AT_ONCE):
        ids.extend(numbers[begin : begin + IDS_AT_ONCE])
        highest = max(ids[begin:])
        if highest >= vocab_size:
            limit = f"{highest} is not a token id; the vocabulary has {vocab_size} tokens"
            raise InvalidRequest.of("token_ids", limit)
    return ids


def part_to_pb(part: Part, *, load_s: float, choice: int) -> inference_pb2.GenerateResponse:
    """Return one message of a choice; only the first choice's usage has the prompt."""
    event = part.event
    message = inference_pb2.GenerateResponse(
        choice=choice,
        offset=event.offset,
        text=event.text,
        token_ids=event.ids,
        parts=map(piece_to_pb, part.pieces),
    )
    if part.seed is not None:
        message.request_id, message.model_digest = part.request_id, part.model_digest
        message.seed = part.seed
        message.prompt_tokens = 0 if choice else part.prompt_tokens
    if isinstance(event, Finished):
        message.finish.CopyFrom(finish_to_pb(event))
        usage = (
            event.usage if not choice else replace(event.usage, prompt_tokens=0, cached_tokens=0)
        )
        message.usage.CopyFrom(usage_to_pb(usage, load_s=load_s))
    return message


def piece_to_pb(piece: PartPiece) -> inference_pb2.OutputPart:
    """Return a piece of an answer."""
    if piece.call is not None:
        return inference_pb2.OutputPart(
            index=piece.index, tool_call=write(piece.call, inference_pb2.ToolCall)
        )
    if piece.reasoning:
        return inference_pb2.OutputPart(index=piece.index, reasoning=piece.text)
    return inference_pb2.OutputPart(index=piece.index, text=piece.text)


def echo_to_pb(prompt: PromptEcho, tokenizer: Tokenizer) -> inference_pb2.PromptEcho:
    """Return an echoed prompt."""
    return inference_pb2.PromptEcho(
        text=prompt.text,
        token_ids=prompt.ids,
        logprobs=logprobs_to_pb(prompt.logprobs, tokenizer),
    )


def logprobs_to_pb(
    positions: Iterable[PositionLogprobs], tokenizer: Tokenizer
) -> Iterator[inference_pb2.PositionLogprobs]:
    """Yield log-probabilities, one for each position."""
    for position in positions:
        yield inference_pb2.PositionLogprobs(
            chosen=_logprob_to_pb(position.chosen, tokenizer),
            top=[_logprob_to_pb(token, tokenizer) for token in position.top],
        )


def _logprob_to_pb(token: TokenLogprob, tokenizer: Tokenizer) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=token.token_id,
        logprob=token.logprob,
        text_bytes=tokenizer.token_bytes(token.token_id),
    )


def finish_to_pb(event: Finished) -> types_pb2.Finish:
    """Return why a stream ended, and what matched."""
    finish = types_pb2.Finish(reason=FINISH_TO_PB[event.reason])
    if event.stop is not None:
        finish.stop_string = event.stop
    if event.stop_token_id is not None:
        finish.stop_token_id = event.stop_token_id
    return finish


def usage_to_pb(usage: Usage, *, load_s: float) -> types_pb2.Usage:
    """Return a stream's usage."""
    message = write(usage, types_pb2.Usage)
    message.total_tokens = usage.prompt_tokens + usage.completion_tokens
    message.load_duration.CopyFrom(duration_to_pb(load_s))
    return message
