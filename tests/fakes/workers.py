"""Workers that live in memory: a launcher, processes and links that a test scripts.

tests/contracts runs the same contracts over these and over real processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from mlxd.v1 import inference_pb2, score_pb2, types_pb2
from mlxd_controller.runtime.kept_lines import KeptLines
from mlxd_controller.runtime.ports import Holding, Question
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.domain.figures import (
    LoadProgress,
    ModelState,
    ProcessStatus,
    WorkerFigures,
    WorkerMemory,
)
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.wire.proof import Checked, Proof
from mlxd_shared.wire.status import RemoteError

SEED = 17
"""What a stream without a seed is given."""
PROMPT_TOKENS = 1


class FakeProcess:
    """Implements ports.WorkerProcess: ends when it is told to, or when a test says so."""

    def __init__(self, pid: int, incarnation: str) -> None:
        self.pid = pid
        self.address = f"fake:{pid}"
        self.incarnation = incarnation
        self.lines: list[str] = []
        self.output = KeptLines()
        self.closes = 0
        self.holding: Holding | None = None
        self.proof: Proof | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._ended.result() if self._ended.done() else None

    def last_lines(self) -> tuple[str, ...]:
        """Return what the test wrote."""
        return tuple(self.lines)

    def remember(self, holding: Holding | None) -> None:
        """Keep it for the test."""
        self.holding = holding

    async def wait_exited(self) -> int:
        """Wait for the end."""
        return await asyncio.shield(self._ended)

    async def close(self) -> int:
        """End at once."""
        self.closes += 1
        self.end(0)
        return await self.wait_exited()

    def end(self, code: int) -> None:
        """End by itself, or by a test's hand; a second end changes nothing."""
        if not self._ended.done():
            self._ended.set_result(code)
            self.output.close()


class FakeLauncher:
    """Implements ports.Launcher. `failure` makes the next launches fail; `gate` holds them."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.devices: list[str] = []
        """Where each is to run."""
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up = 0

    async def launch(self, *, model: str, incarnation: str, device: str = "") -> FakeProcess:
        """Launch, once the gate is open."""
        process = FakeProcess(1000 + len(self.processes), incarnation)
        self.processes.append(process)
        self.devices.append(device)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            await process.close()
            raise
        if self.failure is not None:
            await process.close()
            raise self.failure
        return process


@dataclass(frozen=True, slots=True)
class Refusal:
    """How one stream ends, `after` so many tokens; `code` ends the process with it."""

    error: MlxdError
    code: int | None = None
    after: int = 0
    heard_of: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class LinkScript:
    """What links do. `load_gate` holds each load after its first step; `tokens` are streamed.

    Each of `refusals` ends one stream. `shift` is how far off a resumed stream begins.
    Each of `last_words` is the code with which a question about text ends the process. `poison` is
    the text of a prompt that ends it; any other stream begins when `first_gate` is open.
    """

    load_gate: asyncio.Event = field(default_factory=asyncio.Event)
    load_error: MlxdError | None = None
    stages: tuple[str, ...] = ("starting", "reading weights", "ready")
    tokens: int = 3
    endless: bool = False
    parked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a stream has said its tokens and, being endless, waits."""
    status_gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[Refusal] = field(default_factory=list)
    shift: int = 0
    status_error: MlxdError | None = None
    last_words: list[int] = field(default_factory=list)
    poison: str = ""
    first_gate: asyncio.Event = field(default_factory=asyncio.Event)
    shrink_gate: asyncio.Event = field(default_factory=asyncio.Event)
    shrink_error: MlxdError | None = None
    arrays_bytes: int = 1000
    """What a worker holds, of which streams need `arrays_least_bytes`."""
    arrays_least_bytes: int = 600
    figures_age_s: float = 0.0
    """How old the figures are that a worker tells, as one in a long step does."""

    def __post_init__(self) -> None:
        self.load_gate.set()
        self.first_gate.set()
        self.status_gate.set()
        self.shrink_gate.set()


class FakeStream:
    """Implements ports.RawStream over a list of messages."""

    def __init__(
        self, script: LinkScript, process: FakeProcess, request: inference_pb2.GenerateRequest
    ) -> None:
        self._script = script
        self._process = process
        self._request = request
        self._sent = request.resume_from
        self._begun = False
        self._cancelled = asyncio.Event()

    async def read(self) -> bytes | None:
        """Return the next message; fail as gRPC does where the worker has gone."""
        if self._script.refusals and self._script.refusals[0].after == self._sent:
            self._refuse(self._script.refusals.pop(0))
        if self._script.poison and self._request.text == self._script.poison:
            self._process.end(-9)
        if not self._begun and not self._script.first_gate.is_set():
            await self._until_over(self._script.first_gate)
        if self._sent == self._script.tokens and self._script.endless:
            self._script.parked.set()
            await self._until_over()
        if self._cancelled.is_set():
            raise RemoteError(grpc.StatusCode.CANCELLED, "the controller ended the call")
        if self._process.exit_code is not None:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if self._sent > self._script.tokens:
            return None
        index = self._sent
        self._sent += 1
        message = inference_pb2.GenerateResponse(offset=index, choice=self._request.choice)
        if not self._begun:
            self._begin(message)
        if index < self._script.tokens:
            message.token_ids.append(index)
        else:
            message.finish.reason = types_pb2.FINISH_REASON_LENGTH
            message.usage.prompt_tokens = PROMPT_TOKENS
            message.usage.completion_tokens = index
            message.usage.cache_reason = types_pb2.CACHE_REASON_EVICTED
        return message.SerializeToString()

    def cancel(self) -> None:
        """Tell the worker to stop."""
        self._cancelled.set()

    def _begin(self, message: inference_pb2.GenerateResponse) -> None:
        """Say what only the first message says."""
        self._begun = True
        message.request_id = self._request.request_id
        message.model_digest = self._request.model
        message.seed = self._request.sampling.seed or SEED
        message.prompt_tokens = PROMPT_TOKENS
        if self._request.resume_from:
            message.offset += self._script.shift

    def _refuse(self, refusal: Refusal) -> NoReturn:
        if refusal.code is not None:
            self._process.end(refusal.code)
        refusal.heard_of.set()
        raise refusal.error

    async def _until_over(self, *or_these: asyncio.Event) -> None:
        waiting: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._process.wait_exited()),
            *(asyncio.create_task(event.wait()) for event in (self._cancelled, *or_these)),
        }
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


class FakeLink:
    """Implements ports.WorkerLink for a FakeProcess."""

    def __init__(self, process: FakeProcess, script: LinkScript, digest: str) -> None:
        self._process = process
        self._script = script
        self._digest = digest
        self.specs: list[LoadSpec] = []
        self.at_gate = False
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.targets: list[int] = []
        self.arrays_bytes = script.arrays_bytes
        self.followed: list[ProcessMark] = []
        self.closed = False
        self._state = ModelState.UNLOADED

    async def load(
        self, name: str, path: str, spec: LoadSpec
    ) -> AsyncGenerator[LoadProgress, None]:
        """Yield the script's stages."""
        self.specs.append(spec)
        for index, stage in enumerate(self._script.stages):
            self._check()
            yield LoadProgress(stage, index, len(self._script.stages))
            if index == 0:
                self.at_gate = True
                await self._script.load_gate.wait()
                if self._script.load_error is not None:
                    raise self._script.load_error
        self._check()
        self._state = ModelState.READY

    def generate(self, request: Checked, *, timeout_s: float | None) -> FakeStream:
        """Stream the script's tokens."""
        self._check_open()
        seen = inference_pb2.GenerateRequest.FromString(request.whole())
        self.requests.append(seen)
        return FakeStream(self._script, self._process, seen)

    async def ask(self, question: Question, request: Checked, *, timeout_s: float | None) -> bytes:
        """Return one id a byte, or undo that; or a vector a text: how long it is, and 1.

        A continuation's score is minus its length.
        """
        if self._script.last_words:
            self._process.end(self._script.last_words.pop(0))
        self._check()
        if question is Question.TOKENIZE:
            ids = list(inference_pb2.TokenizeRequest.FromString(request.whole()).text.encode())
            answer = inference_pb2.TokenizeResponse(token_ids=ids, model_digest=self._digest)
            return answer.SerializeToString()
        if question is Question.DETOKENIZE:
            token_ids = inference_pb2.DetokenizeRequest.FromString(request.whole()).token_ids
            return inference_pb2.DetokenizeResponse(
                text=bytes(token_ids).decode()
            ).SerializeToString()
        if question is Question.SCORE:
            scoring = score_pb2.ScoreRequest.FromString(request.whole())
            lengths = [len(text) for each in scoring.texts for text in each.continuations]
            scores = [score_pb2.Score(logprob=-length, tokens=1) for length in lengths]
            return score_pb2.ScoreResponse(scores=scores).SerializeToString()
        texts = inference_pb2.EmbedRequest.FromString(request.whole()).texts
        vectors = [inference_pb2.Embedding(values=[len(text), 1]) for text in texts]
        made = inference_pb2.EmbedResponse(embeddings=vectors, prompt_tokens=len(vectors))
        return made.SerializeToString()

    async def status(self, *, timeout_s: float) -> ProcessStatus:
        """Answer when the gate is open, or not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._script.status_gate.wait()
        except TimeoutError:
            raise RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if self._script.status_error is not None:
            raise self._script.status_error
        self._check()
        return self._own_status()

    async def watch(self, *, interval_s: float) -> AsyncGenerator[ProcessStatus, None]:
        """Answer at every interval while the process lives."""
        while self._process.exit_code is None:
            self._check_open()
            yield self._own_status()
            waiting = asyncio.ensure_future(self._process.wait_exited())
            await asyncio.wait({waiting}, timeout=interval_s)
            waiting.cancel()

    def _own_status(self) -> ProcessStatus:
        memory = WorkerMemory(total_nbytes=1000, mlx_active_nbytes=self.arrays_bytes)
        own = WorkerFigures(
            pid=self._process.pid,
            state=self._state,
            memory=memory,
            age_s=self._script.figures_age_s,
        )
        return ProcessStatus(workers=(own,))

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Answer as the script says, once its gate is open."""
        self.targets.append(target_bytes)
        await self._script.shrink_gate.wait()
        self._check()
        if self._script.shrink_error is not None:
            raise self._script.shrink_error
        before_bytes = self.arrays_bytes
        needed_bytes = max(target_bytes, self._script.arrays_least_bytes)
        self.arrays_bytes = min(before_bytes, needed_bytes)
        return before_bytes, self.arrays_bytes

    async def share_disk(self, nbytes: int, *, timeout_s: float) -> None:
        """Keep nothing on disk, as before."""
        self._check()

    async def unload(self, *, timeout_s: float) -> None:
        """Hold no model any more."""
        self._check()
        self._state = ModelState.UNLOADED

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Note whom it follows."""
        self._check()
        if not controller.pid:
            raise InvalidRequest.of("controller_pid", "is needed")
        self.followed.append(controller)

    async def shutdown(self, *, timeout_s: float) -> None:
        """End the process."""
        self._check()
        self._process.end(0)

    async def close(self) -> None:
        """Note it."""
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "the connection is closed")

    def _check(self) -> None:
        self._check_open()
        if self._process.exit_code is not None:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class FakeWorkers:
    """A launcher and the links to its processes, with one script for all."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.script = LinkScript()
        self.links: list[FakeLink] = []

    def connect(
        self, *, address: str, incarnation: str, digest: str, proof: Proof | None = None
    ) -> FakeLink:
        """Implements ports.Connect."""
        process = next(p for p in self.launcher.processes if p.address == address)
        assert process.incarnation == incarnation
        link = FakeLink(process, self.script, digest)
        self.links.append(link)
        return link

    @property
    def living(self) -> int:
        """How many processes have not ended."""
        return sum(process.exit_code is None for process in self.launcher.processes)
