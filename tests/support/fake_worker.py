"""A real worker process without a model: the ready pipe, the life pipe and the wire, scripted.

Run by its path: `python fake_worker.py SCRIPT --listen ... --incarnation ...`, as the launcher runs
the real one. SCRIPT says what it does at the start; what a stream does is said by its prompt:
`count N` ends well, `die N` kills the process after N tokens, `stop N` ends the stream without a
finish, `hang N` goes on for ever.
"""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    score_pb2,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_shared.domain.errors import FieldNotServed, InvalidModel, InvalidRequest, WrongWorker
from mlxd_shared.wire.interceptors import Context, ErrorInterceptor
from mlxd_shared.wire.proof import Proof
from mlxd_shared.wire.records import duration_from_pb

LONG_LINE_CHARS = 1 << 20
EXIT_CODE = 3
SECONDS_MAX = 120.0
"""However a test goes wrong, no fake worker lives longer than this."""


def say(text: str) -> None:
    """Write to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class FakeWorker(
    inference_pb2_grpc.InferenceServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """Serves what the controller uses of a worker."""

    def __init__(self, script: str, incarnation: str) -> None:
        self.script = script
        self.incarnation = incarnation
        self.stopping = asyncio.Event()
        self.streams = 0
        self.state = types_pb2.MODEL_STATE_UNLOADED

    async def Load(
        self, request: worker_pb2.LoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LoadResponse]:
        """Load as the script says."""
        self._check(request.worker_incarnation)
        yield _load_response("starting", 0)
        if self.script == "load-stall":
            await asyncio.Event().wait()
        if self.script == "load-exit":
            say("out of luck\n")
            os._exit(EXIT_CODE)
        if self.script == "load-invalid":
            raise InvalidModel("a tensor too many", file="model.safetensors", field="extra")
        if self.script == "load-unfinished":
            return
        yield _load_response("reading weights", 5)
        self.state = types_pb2.MODEL_STATE_READY
        yield _load_response("ready", 10)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream as the prompt says."""
        self._check(request.worker_incarnation)
        verb, _, number = request.text.partition(" ")
        if not number.isdecimal():
            raise FieldNotServed("prompt")
        count = int(number)
        self.streams += 1
        try:
            for index in range(count):
                message = inference_pb2.GenerateResponse(
                    offset=index, text=f"w{index} ", token_ids=[index]
                )
                if index == 0:
                    message.request_id, message.model_digest = request.request_id, request.model
                yield message
            if verb == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if verb == "hang":
                await asyncio.Event().wait()
            if verb != "stop":
                yield _finish_message(count, request)
        finally:
            self.streams -= 1

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Return one id a byte."""
        self._check(request.worker_incarnation)
        ids = list(request.text.encode())
        return inference_pb2.TokenizeResponse(token_ids=ids, model_digest=request.model)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Undo Tokenize."""
        self._check(request.worker_incarnation)
        text = bytes(request.token_ids).decode()
        return inference_pb2.DetokenizeResponse(text=text, model_digest=request.model)

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        """Say who this is."""
        return status_pb2.GetStatusResponse(status=self._status())

    def _status(self) -> status_pb2.Status:
        worker = status_pb2.WorkerStatus(
            pid=os.getpid(),
            incarnation=self.incarnation,
            state=self.state,
            streams_running=self.streams,
        )
        worker.memory.total_bytes = 1000
        return status_pb2.Status(workers=[worker])

    async def Shutdown(
        self, request: worker_pb2.ShutdownRequest, context: Context
    ) -> worker_pb2.ShutdownResponse:
        """End after the answer, unless the script is to be stubborn."""
        self._check(request.worker_incarnation)
        if self.script != "stubborn":
            self.stopping.set()
        return worker_pb2.ShutdownResponse()

    async def Adopt(
        self, request: worker_pb2.AdoptRequest, context: Context
    ) -> worker_pb2.AdoptResponse:
        """Follow nobody, but refuse what no worker takes."""
        self._check(request.worker_incarnation)
        if not request.controller_pid:
            raise InvalidRequest.of("controller_pid", "is needed")
        return worker_pb2.AdoptResponse()

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Refuse."""
        self._check(request.worker_incarnation)
        vectors = [inference_pb2.Embedding(values=[len(text), 1]) for text in request.texts]
        return inference_pb2.EmbedResponse(embeddings=vectors, prompt_tokens=len(vectors))

    async def Score(
        self, request: score_pb2.ScoreRequest, context: Context
    ) -> score_pb2.ScoreResponse:
        """Return minus the length of each continuation, as one token."""
        self._check(request.worker_incarnation)
        lengths = [len(text) for each in request.texts for text in each.continuations]
        scores = [score_pb2.Score(logprob=-length, tokens=1) for length in lengths]
        return score_pb2.ScoreResponse(scores=scores)

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        """Say who this is at every interval, and end with the process."""
        while not self.stopping.is_set():
            yield status_pb2.WatchStatusResponse(status=self._status())
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), duration_from_pb(request.interval))

    async def Unload(
        self, request: worker_pb2.UnloadRequest, context: Context
    ) -> worker_pb2.UnloadResponse:
        """Hold no model any more."""
        self._check(request.worker_incarnation)
        self.state = types_pb2.MODEL_STATE_UNLOADED
        return worker_pb2.UnloadResponse()

    async def Shrink(
        self, request: worker_pb2.ShrinkRequest, context: Context
    ) -> worker_pb2.ShrinkResponse:
        """Give back down to the target, but 600 of its 1000 bytes."""
        self._check(request.worker_incarnation)
        after = max(600, min(1000, request.target_bytes))
        return worker_pb2.ShrinkResponse(bytes_before=1000, bytes_after=after)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Refuse."""
        raise FieldNotServed("Drain")

    def _check(self, incarnation: str) -> None:
        if incarnation != self.incarnation:
            raise WrongWorker(incarnation, self.incarnation)


def _load_response(stage: str, done: int) -> worker_pb2.LoadResponse:
    progress = types_pb2.LoadProgress(stage=stage, bytes_read=done, bytes_total=10)
    return worker_pb2.LoadResponse(progress=progress)


def _finish_message(
    count: int, request: inference_pb2.GenerateRequest
) -> inference_pb2.GenerateResponse:
    usage = types_pb2.Usage(
        prompt_tokens=2, completion_tokens=count, total_tokens=count + 2,
        load_duration=request.load_duration,
    )  # fmt: skip
    usage.completion_duration.FromMilliseconds(10 * max(0, count - 1))
    return inference_pb2.GenerateResponse(
        offset=count,
        finish=types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH),
        usage=usage,
        request_id="" if count else request.request_id,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    parser.add_argument("--orphan-grace", type=float, required=True)
    parser.add_argument("--device", default="")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--log-format", choices=["json"], required=True)
    return parser.parse_args()


def _before_ready(script: str, ready_fd: int, life_fd: int, device: str) -> None:
    """Do what a script does instead of becoming ready, or just before."""
    match script:
        case "exit":
            say("one\ntwo\n")
            sys.stderr.write("three\n")
            sys.exit(EXIT_CODE)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.pause()
        case "refuse":
            os.write(ready_fd, json.dumps({"error": "no backend is installed"}).encode() + b"\n")
            sys.exit(1)
        case "gibberish":
            os.write(ready_fd, b"ready!\n")
            signal.pause()
        case "long-line":
            say("x" * LONG_LINE_CHARS)
            say("\nshort\n")
        case "grandchild":
            # A process that outlives this one and holds its output open.
            # It goes when the controller lets go of the life pipe.
            wait = "import select, sys; select.select([int(sys.argv[1])], [], [])"
            command = [sys.executable, "-c", wait, str(life_fd)]
            subprocess.Popen(command, pass_fds=(life_fd,))
            os._exit(EXIT_CODE)
        case "device":
            say(f"{device} {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}\n")
        case "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)


async def _serve(options: argparse.Namespace) -> None:
    worker = FakeWorker(options.script, options.incarnation)
    loop = asyncio.get_running_loop()
    if options.script != "stubborn":
        loop.add_signal_handler(signal.SIGINT, worker.stopping.set)
    loop.add_reader(options.life_fd, worker.stopping.set)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(worker, server)
    status_pb2_grpc.add_StatusServiceServicer_to_server(worker, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    server.add_insecure_port(options.listen)
    await server.start()
    line = {"address": options.listen, "pid": os.getpid(), "incarnation": options.incarnation}
    line |= {"version": "0", "proof": Proof.make().secret}
    os.write(options.ready_fd, json.dumps(line).encode() + b"\n")
    os.close(options.ready_fd)
    async with asyncio.timeout(SECONDS_MAX):
        await worker.stopping.wait()
    loop.remove_reader(options.life_fd)
    await server.stop(0.1)


def main() -> None:
    """Run as the command line says."""
    options = _options()
    _before_ready(options.script, options.ready_fd, options.life_fd, options.device)
    asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
