"""The typed async client: everything a program needs from mlxd, without MLX or protobuf.

    async with Client("127.0.0.1:8555") as client:
        async with client.generate("Once upon a time", model="demo") as stream:
            async for event in stream:
                ...  # Delta, Delta, ..., Finished

Every method raises the server's own error (a class of mlxd_shared.domain.errors with its fields),
or RemoteError if the transport fails. A passed deadline is RemoteError with DEADLINE_EXCEEDED, or
DeadlinePassed if the server reports it first.
One client is one channel, for one event loop; any number of calls may run concurrently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd import _wire
from mlxd import messages as m
from mlxd._connection import Connection
from mlxd._prefixes import Prefixes, answer_of
from mlxd._resuming import GenerateCall, ResumingCall
from mlxd._streams import (
    BrokenStream,
    Call,
    EachReader,
    GenerationReader,
    LoadReader,
    PullReader,
    Stream,
)
from mlxd._wire import spell
from mlxd.answers import Completion, Delta, Finished
from mlxd.v1 import inference_pb2, model_pb2, score_pb2, status_pb2
from mlxd.v1.inference_pb2_grpc import InferenceServiceStub
from mlxd.v1.model_pb2_grpc import ModelServiceStub
from mlxd.v1.status_pb2_grpc import StatusServiceStub
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat
from mlxd_shared.domain.pulls import PullProgress
from mlxd_shared.domain.requests import LoadSpec, Score, ScoredText
from mlxd_shared.wire.records import read


class Client(Connection):
    """A connection to a controller (or, for generate and status, to a worker).

    `address` is `HOST:PORT` or `unix:PATH`; `timeout_s` limits each call with a single answer.
    Streams last as long as they need, unless they have a `timeout_s` of their own. `security` names
    the files for TLS and the token. They are read when the client is entered, which raises
    BadCredentials, or InvalidRequest if they do not fit together.

    Raises:
        InvalidRequest: `address` is neither form.
    """

    def generate(
        self,
        prompt: _wire.Prompt,
        *,
        reconnect: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[_wire.GenerateOptions],
    ) -> Stream[Delta | Finished]:
        """Start a completion of `prompt` (text, token ids, or a Chat) and return its stream.

        The stream yields Deltas, without gap or repeat, and one Finished at the end; it raises
        BrokenStream if the server breaks that rule. `n` requests that many choices of the prompt,
        each with its own deltas and end, as they arrive. Options that are None or empty are left to
        the server. `logprobs` requests each token's log-probability, with that many of the best
        tokens (0 for none). At most `speculation_depth` tokens are guessed at once, which affects
        only speed; 0 guesses none. A complete output matches `response_format`; one that is cut
        off, by its length for instance, need not. An empty `model` is valid if exactly one is
        configured.
        Of waiting streams, those with higher `priority` are served earlier. `keep_alive_s` math.inf
        means for ever, 0 unloads when idle.

        A stream whose worker dies continues on another one, unless `migrate` is False. `resume` is
        the output so far of a stream that broke off: this stream continues it, provided that all
        other options are the same and `sampling` has that stream's seed. `reconnect` resumes
        automatically after the loss of connection or server, for up to RECONNECT_WINDOW_S without a
        token.

        Raises:
            InvalidRequest: a value that the wire cannot carry (other ranges: from the stream).
        """
        if reconnect and isinstance(prompt, Chat) and prompt.now_s is None:
            prompt = replace(prompt, now_s=time.time())  # the same for every call
        request = _wire.generate_to_pb(prompt, **options)
        call: Call = (
            ResumingCall(self._generate, request, timeout_s=timeout_s)
            if reconnect
            else self._generate(request, timeout_s)
        )
        reader = GenerationReader(resumed=len(request.resume_token_ids), choices=request.n or 1)
        return Stream(call, reader)

    def _generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> GenerateCall:
        return InferenceServiceStub(self._opened).Generate(request, timeout=timeout_s)

    async def complete(
        self,
        prompt: _wire.Prompt,
        *,
        reconnect: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[_wire.GenerateOptions],
    ) -> Completion:
        """Return the whole completion, the first of several; the arguments are `generate`'s."""
        stream = self.generate(prompt, reconnect=reconnect, timeout_s=timeout_s, **options)
        async with stream:
            return Completion.each_of([event async for event in stream])[0]

    async def choices(
        self,
        prompt: _wire.Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[_wire.GenerateOptions],
    ) -> tuple[Completion, ...]:
        """Return the `n` completions of a prompt, evaluated once; otherwise as `generate`."""
        stream = self.generate(prompt, timeout_s=timeout_s, **options)
        async with stream:
            return Completion.each_of([event async for event in stream])

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of `text`; loads the model if necessary."""
        request = spell(
            inference_pb2.TokenizeRequest,
            model=model,
            text=text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
        call = InferenceServiceStub(self._opened).Tokenize(request, timeout=timeout_s)
        return tuple((await answer_of(call)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Return the text of `token_ids`; loads the model if necessary."""
        request = spell(
            inference_pb2.DetokenizeRequest,
            model=model,
            token_ids=token_ids,
            skip_special_tokens=skip_special_tokens,
        )
        call = InferenceServiceStub(self._opened).Detokenize(request, timeout=timeout_s)
        return (await answer_of(call)).text

    async def embed(
        self,
        texts: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[_wire.EmbedOptions],
    ) -> tuple[tuple[float, ...], ...]:
        """Return a vector for each of `texts`; the arguments are those of `embeddings`."""
        return (await self.embeddings(texts, timeout_s=timeout_s, **options)).vectors

    async def embeddings(
        self,
        texts: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[_wire.EmbedOptions],
    ) -> m.Embeddings:
        """Return a vector for each of `texts`, and their token count; loads the model if need be.

        `dimensions` shortens each vector to that many; `pooling` and `normalize` None mean the
        model's own.

        Raises:
            InvalidRequest: a value that the wire cannot carry, or that the server refuses.
        """
        _wire.check_options(_wire.EmbedOptions, options)
        request = spell(inference_pb2.EmbedRequest, texts=texts, **options)
        pb = await answer_of(InferenceServiceStub(self._opened).Embed(request, timeout=timeout_s))
        vectors = tuple(tuple(vector.values) for vector in pb.embeddings)
        return m.Embeddings(vectors, pb.prompt_tokens, pb.model_digest)

    async def score(
        self,
        texts: Sequence[ScoredText],
        *,
        timeout_s: float | None = None,
        **options: Unpack[_wire.ScoreOptions],
    ) -> tuple[tuple[Score, ...], ...]:
        """Return the scores of continuations; the arguments are those of `scores`."""
        return (await self.scores(texts, timeout_s=timeout_s, **options)).scores

    async def scores(
        self,
        texts: Sequence[ScoredText],
        *,
        timeout_s: float | None = None,
        **options: Unpack[_wire.ScoreOptions],
    ) -> m.Scores:
        """Return how likely the model finds each text's continuations, with the token count.

        With `reranking` each text is a document to be compared with the query, in the form of the
        model's chat template, and the continuations begin the answer: score "yes" and "no"; the
        difference of the two log-probabilities is the rank.

        Raises:
            InvalidRequest: a value that the wire cannot carry, or that the server refuses.
            NoChatTemplate: `reranking` with a model without a template.
        """
        _wire.check_options(_wire.ScoreOptions, options)
        request = spell(score_pb2.ScoreRequest, texts=texts, **options)
        pb = await answer_of(InferenceServiceStub(self._opened).Score(request, timeout=timeout_s))
        scores = iter([read(Score, each) for each in pb.scores])
        by_text = tuple(tuple(islice(scores, len(each.continuations))) for each in texts)
        return m.Scores(by_text, pb.prompt_tokens, pb.model_digest)

    def load(
        self,
        model: str,
        *,
        name: str = "",
        options: LoadSpec = LoadSpec(),  # noqa: B008 - frozen
        timeout_s: float | None = None,
    ) -> Stream[m.LoadUpdate]:
        """Load a model, by name or by its folder's path on the server, and return the progress.

        The last update is READY, otherwise the stream raises. Leaving the stream ends no load.
        """
        request = spell(model_pb2.LoadModelRequest, model=model, name=name, options=options)
        call = ModelServiceStub(self._opened).LoadModel(request, timeout=timeout_s)
        return Stream(call, LoadReader())

    async def fit(
        self,
        model: str,
        *,
        name: str = "",
        options: LoadSpec = LoadSpec(),  # noqa: B008 - frozen
    ) -> m.FitReport:
        """Return whether and how `model` would fit; nothing is loaded or evicted."""
        shape = model_pb2.LoadModelRequest
        request = spell(shape, model=model, name=name, options=options, validate_only=True)
        call = ModelServiceStub(self._opened).LoadModel(request, timeout=self._timeout_s)
        async with Stream(call, EachReader(partial(read, m.LoadUpdate))) as updates:
            async for update in updates:
                if update.fit is not None:
                    return update.fit
        raise BrokenStream("it ended without a fit report")

    async def unload(
        self, model: str, *, grace_s: float | None = None, force: bool = False
    ) -> m.Unloaded:
        """Unload `model`; streams in progress have `grace_s` to end; `force` ends them at once.

        Returns when it is done. A model that is not loaded is no error; an empty name is refused.
        """
        request = spell(model_pb2.UnloadModelRequest, model=model, grace=grace_s, force=force)
        wait_s = self._timeout_s + (config.UNLOAD_GRACE_DEFAULT_S if grace_s is None else grace_s)
        timeout_s = None if math.isinf(wait_s) else wait_s
        pb = await answer_of(ModelServiceStub(self._opened).UnloadModel(request, timeout=timeout_s))
        return read(m.Unloaded, pb)

    def pull(self, model: str, *, include: Sequence[str] = ()) -> Stream[PullProgress]:
        """Have the server download `model`, ORG/NAME[@REVISION], and return the progress.

        `include` are patterns of further files. The last step has the result, otherwise the stream
        raises. The download ends with the last stream that follows it; a later one resumes it.
        """
        request = spell(model_pb2.PullModelRequest, model=model, include=include)
        return Stream(ModelServiceStub(self._opened).PullModel(request), PullReader())

    async def forget(self, name: str) -> tuple[str, ...]:
        """Remove a name that a load gave to a folder; return the folder's remaining names."""
        request = spell(model_pb2.ForgetModelRequest, name=name)
        call = ModelServiceStub(self._opened).ForgetModel(request, timeout=self._timeout_s)
        return tuple((await answer_of(call)).names)

    @property
    def prefixes(self) -> Prefixes:
        """What the server keeps on disk of prompts."""
        return Prefixes(self._opened, timeout_s=self._timeout_s)

    async def models(self) -> tuple[m.Model, ...]:
        """Return every model that the controller knows, in its order."""
        models: list[m.Model] = []
        request = model_pb2.ListModelsRequest(page_size=config.PAGE_SIZE_MAX)
        listing = ModelServiceStub(self._opened).ListModels
        while True:
            page = await answer_of(listing(request, timeout=self._timeout_s))
            models += [read(m.Model, pb) for pb in page.models]
            if not page.next_page_token or len(models) > config.MODELS_MAX:
                return tuple(models)
            request.page_token = page.next_page_token

    async def model(self, model: str = "") -> m.Model:
        """Return one model, by name, alias or digest."""
        request = spell(model_pb2.GetModelRequest, model=model)
        call = ModelServiceStub(self._opened).GetModel(request, timeout=self._timeout_s)
        return read(m.Model, (await answer_of(call)).model)

    def watch_models(self, model: str = "") -> Stream[m.Model]:
        """Return every model (or this one) once, then each change, until the stream is left."""
        request = spell(model_pb2.WatchModelsRequest, model=model)
        call = ModelServiceStub(self._opened).WatchModels(request)
        return Stream(call, EachReader(lambda pb: read(m.Model, pb.model)))

    def read_logs(
        self, model: str, *, tail: int | None = None, follow: bool = False
    ) -> Stream[m.LogLines]:
        """Return the output of `model`'s worker: its last `tail` lines, or all that are kept.

        With `follow` the stream continues with further lines until the worker has ended.
        """
        request = spell(model_pb2.ReadLogsRequest, model=model, tail=tail, follow=follow)
        timeout_s = None if follow else self._timeout_s
        call = ModelServiceStub(self._opened).ReadLogs(request, timeout=timeout_s)
        return Stream(call, EachReader(partial(read, m.LogLines)))

    async def status(self, model: str = "") -> m.Status:
        """Return the server's status, with all workers or those of `model`."""
        request = spell(status_pb2.GetStatusRequest, model=model)
        call = StatusServiceStub(self._opened).GetStatus(request, timeout=self._timeout_s)
        return read(m.Status, (await answer_of(call)).status)

    def watch_status(
        self, model: str = "", *, interval_s: float = config.WATCH_INTERVAL_DEFAULT_S
    ) -> Stream[m.Status]:
        """Return the status at once and then every `interval_s`, until the stream is left."""
        request = spell(status_pb2.WatchStatusRequest, model=model, interval=interval_s)
        call = StatusServiceStub(self._opened).WatchStatus(request)
        return Stream(call, EachReader(lambda pb: read(m.Status, pb.status)))

    async def healthy(self, service: str = "") -> bool:
        """Return whether the server is serving now, or one of its services or `models/NAME`.

        Raises:
            RemoteError: NOT_FOUND for an unknown name.
        """
        request = spell(health_pb2.HealthCheckRequest, service=service)
        health: Any = health_pb2_grpc.HealthStub(self._opened)  # untyped
        response = await answer_of(health.Check(request, timeout=self._timeout_s))
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
