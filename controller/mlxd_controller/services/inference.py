"""InferenceService: checks a request, and has its model's workers answer it.

A Generate is relayed from worker to worker (`relay`). The other calls are repeated once, on the
next worker, if the first one has gone.
"""

# ruff: noqa: N802 - gRPC's names

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2, score_pb2
from mlxd_controller.runtime.ports import Clock, ModelRef, Question
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.choices import choice_ids, merge, split
from mlxd_controller.services.losses import GONE, LEAVING_WAIT_S, explain, link_of, model_wait_s
from mlxd_controller.services.meter import Counts, Meter
from mlxd_controller.services.quarantine import PromptKey, Quarantine
from mlxd_controller.services.relay import Relay
from mlxd_controller.services.transcript import Transcript
from mlxd_models.files.image_settings import unseen
from mlxd_shared import config
from mlxd_shared.domain.errors import DuplicateRequest, FieldNotServed, InvalidRequest, MlxdError
from mlxd_shared.ops.logs import bind_to_log
from mlxd_shared.security.callers import current_caller
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.convert_bounds import check_ids, text_of
from mlxd_shared.wire.convert_embed import embed_from_pb
from mlxd_shared.wire.convert_score import score_from_pb
from mlxd_shared.wire.intake import as_checked, run_paced, sent_nbytes
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import RemoteError

DESCRIPTOR = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_PRIVATE = frozenset({"worker_incarnation", "load_duration", "age", "choice"})
"""Fields that only the controller sets."""
_COUNTED: dict[Question, type[inference_pb2.EmbedResponse | score_pb2.ScoreResponse]] = {
    Question.EMBED: inference_pb2.EmbedResponse,
    Question.SCORE: score_pb2.ScoreResponse,
}
"""The answers that report how many tokens a model has evaluated for them."""
_Asking = TypeVar(
    "_Asking",
    inference_pb2.TokenizeRequest,
    inference_pb2.DetokenizeRequest,
    inference_pb2.EmbedRequest,
    score_pb2.ScoreRequest,
)


class InferenceService:
    """Implements the service; answers are bytes, as the worker sent them."""

    def __init__(
        self,
        catalog: Catalog,
        runtime: Runtime,
        clock: Clock,
        *,
        allowances: Allowances,
        log_content: bool = False,
    ) -> None:
        self._log_content = log_content
        self._allowances = allowances
        self._catalog = catalog
        self._runtime = runtime
        self._clock = clock
        self._in_flight: set[str] = set()
        self._quarantine = Quarantine(clock)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        """Relay a completion as serialised GenerateResponse messages."""
        with Meter(self._runtime.metrics, self._clock) as meter:
            _refuse_private(request)
            spec = await run_paced(generate_from_pb, request, with_prompt=False)
            _check_copies(request, spec.choices)
            now = _time_of(request)
            transcript = Transcript(wanted=self._log_content)
            model_ref = await self._catalog.find(spec.model)
            with (
                self._catalog.keeping(model_ref) as ref,
                self._flight(request, spec.choices) as request_id,
                self._spending(spec.model, ref, meter.counts),
            ):
                meter.model, meter.resumed = ref.name, len(spec.resumed)
                meter.request_id = request_id
                if ref.facts.sight is None:  # before anybody is unloaded for it
                    await run_paced(_refuse_images, request, ref)
                bind_to_log(request_id=request_id, model=ref.name)
                key = PromptKey(request, ref.digest)
                relays = [
                    Relay(
                        self._runtime,
                        self._quarantine,
                        ref=ref,
                        spec=spec,
                        request=request,
                        changes=changes,
                        meter=meter,
                        key=key,
                    )
                    for changes in split(request, request_id, spec.choices, now=now)
                ]
                streams = [relay.frames(context) for relay in relays]
                whole = streams[0] if len(streams) == 1 else merge(streams)
                async with transcript.of(request), aclosing(whole) as frames:
                    async for frame in frames:
                        transcript.note_frame(frame)
                        yield frame

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> bytes:
        """Turn text into token ids with the model's own tokenizer."""
        return await self._ask(Question.TOKENIZE, text_of, request, context)

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Context) -> bytes:
        """Turn token ids into text."""
        return await self._ask(Question.DETOKENIZE, check_ids, request, context)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> bytes:
        """Return the vectors of texts."""
        return await self._ask(Question.EMBED, embed_from_pb, request, context)

    async def Score(self, request: score_pb2.ScoreRequest, context: Context) -> bytes:
        """Return how likely the model finds continuations."""
        return await self._ask(Question.SCORE, score_from_pb, request, context)

    @contextmanager
    def _flight(self, request: inference_pb2.GenerateRequest, choices: int) -> Iterator[str]:
        """Reserve the ids of the request (made if absent) and its choices; raise if one is used."""
        request_id = request.request_id or uuid.uuid4().hex
        ids = choice_ids(request_id, choices)
        duplicate = next((each for each in ids if each in self._in_flight), None)
        if duplicate is not None:
            raise DuplicateRequest(duplicate)
        self._in_flight.update(ids)
        try:
            yield request_id
        finally:
            self._in_flight.difference_update(ids)

    def _spending(self, name: str, ref: ModelRef, counts: Counts) -> AbstractContextManager[None]:
        """Charge the caller's key; raises NotAllowed and KeyLimit."""
        key = current_caller.get().key
        return self._allowances.spending(key, (name or ref.name, ref.name), counts)

    async def _ask(
        self,
        question: Question,
        check: Callable[[_Asking], object],
        request: _Asking,
        context: Context,
    ) -> bytes:
        """Return a worker's answer; if the worker has gone, the next worker's.

        check: refuses what no worker would take.
        """
        _refuse_private(request)
        await run_paced(check, request)
        again, counts = True, Counts()
        with (
            self._catalog.keeping(await self._catalog.find(request.model)) as ref,
            self._spending(request.model, ref, counts),
        ):
            while True:
                wait_s = model_wait_s(context.time_remaining())
                async with self._runtime.lease(ref, keep_alive_s=None, timeout_s=wait_s) as lease:
                    loss: MlxdError
                    try:
                        answer = await link_of(lease).ask(
                            question, as_checked(request), timeout_s=context.time_remaining()
                        )
                    except RemoteError as error:
                        loss = await explain(error, lease, 0)
                    except GONE as error:
                        loss = error
                    else:
                        counts.prompt_tokens = _prompt_tokens(question, answer)
                        return answer
                if lease.aborted is not None or not again or not isinstance(loss, GONE):
                    raise loss
                if not await lease.worker.wait_ended(wait_s=LEAVING_WAIT_S):
                    raise loss
                again = False


def _prompt_tokens(question: Question, answer: bytes) -> int:
    """Return how many tokens a model has evaluated for an answer; 0 if no key is charged."""
    counted = _COUNTED.get(question)
    if counted is None or current_caller.get().key is None:
        return 0
    return counted.FromString(answer).prompt_tokens


def _check_copies(request: inference_pb2.GenerateRequest, choices: int) -> None:
    """Refuse more choices than a request of this size may have: each is sent all of its bytes."""
    if choices > 1 and choices * sent_nbytes(request) > config.CHOICES_BYTES_MAX:
        limit = f"a request of this size has at most {config.CHOICES_BYTES_MAX} in all choices"
        raise InvalidRequest.of("n", limit)


def _time_of(request: inference_pb2.GenerateRequest) -> Timestamp | None:
    """Return the time of a conversation that has none: now; None: there is nothing to set."""
    if not request.HasField("chat") or request.chat.HasField("now"):
        return None
    now = Timestamp()
    now.GetCurrentTime()
    return now


def _refuse_images(request: inference_pb2.GenerateRequest, model: ModelRef) -> None:
    """Refuse images that a model would not see; raises FieldNotServed for the first."""
    why = unseen(model.name, model.facts.unseeing)
    for index, message in enumerate(request.chat.messages):
        for number, part in enumerate(message.parts):
            if part.HasField("image"):
                raise FieldNotServed(f"chat.messages[{index}].parts[{number}].image", why)


def _refuse_private(request: Message) -> None:
    for field, _ in request.ListFields():
        if field.name in _PRIVATE:
            raise InvalidRequest.of(field.name, "is set by the controller")
