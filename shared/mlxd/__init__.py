"""mlxd for Python programs: the typed client, what it takes and returns, and every error it raises.

    from mlxd import Client, Delta

Names are imported when they are first used: the generated messages lie in this package too, and a
program that needs these alone does not pay for a client. `__all__` is what programs may rely on.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxd._prefixes import Prefixes
    from mlxd._streams import BrokenStream, Stream
    from mlxd.answers import (
        Calls,
        Completion,
        Delta,
        Finished,
        PositionLogprobs,
        PromptEcho,
        TokenLogprob,
        Usage,
    )
    from mlxd.client import Client
    from mlxd.messages import (
        Absence,
        DeviceStatus,
        DroppedPrefixes,
        Embeddings,
        FitReport,
        FitTerm,
        Histogram,
        LoadUpdate,
        LogLines,
        MetricFamily,
        MetricKind,
        MetricPoint,
        Model,
        PrefixFolder,
        PrefixStore,
        ProcessRole,
        Scores,
        Status,
        Unloaded,
        VerifiedPrefixes,
        WorkerStatus,
    )
    from mlxd_shared.domain.cache_reasons import CacheReason
    from mlxd_shared.domain.chats import (
        AnswerPart,
        Chat,
        ChatMessage,
        ContentPart,
        ToolCall,
        ToolChoice,
    )
    from mlxd_shared.domain.errors import (
        BackendProblem,
        BadCredentials,
        DeadlinePassed,
        DuplicateRequest,
        ExtraMissing,
        FieldNotServed,
        FieldViolation,
        HubDenied,
        HubUnavailable,
        InternalError,
        InvalidModel,
        InvalidRequest,
        KeyLimit,
        LoadAbandoned,
        MachineShort,
        MlxdError,
        ModelDraining,
        ModelLoading,
        ModelNotFound,
        ModelTooLarge,
        ModelUnloaded,
        NoChatTemplate,
        NoRoom,
        NotAllowed,
        PoisonPrompt,
        PullFailed,
        PullInterrupted,
        QueueFull,
        ShuttingDown,
        StoreFull,
        WorkerExited,
        WorkerLost,
        WorkerStartFailed,
        WorkerTimedOut,
        WrongWorker,
    )
    from mlxd_shared.domain.figures import (
        HostMemory,
        LoadProgress,
        MathLibrary,
        MemoryAccount,
        ModelState,
        PrefixDisk,
        RankMemory,
        WorkerMemory,
    )
    from mlxd_shared.domain.formats import FormatKind, ResponseFormat
    from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
    from mlxd_shared.domain.requests import (
        FinishReason,
        KVFormat,
        LoadSpec,
        Pooling,
        Reranking,
        SamplingOptions,
        Score,
        ScoredText,
        Weights,
    )
    from mlxd_shared.security.secure_channel import ChannelSecurity, call_headers
    from mlxd_shared.wire.status import RemoteError

    __version__: str

# fmt: off
__all__ = [
    "Absence", "AnswerPart", "BackendProblem", "BadCredentials", "BrokenStream", "CacheReason",
    "Calls", "ChannelSecurity", "Chat", "ChatMessage", "Client", "Completion", "ContentPart",
    "DeadlinePassed", "Delta", "DeviceStatus", "DroppedPrefixes", "DuplicateRequest", "Embeddings",
    "ExtraMissing", "FieldNotServed", "FieldViolation", "FinishReason", "Finished", "FitReport",
    "FitTerm", "FormatKind", "Histogram", "HostMemory", "HubDenied", "HubUnavailable",
    "InternalError", "InvalidModel", "InvalidRequest", "KVFormat", "KeyLimit", "LoadAbandoned",
    "LoadProgress", "LoadSpec", "LoadUpdate", "LogLines", "MachineShort", "MathLibrary",
    "MemoryAccount", "MetricFamily", "MetricKind", "MetricPoint", "MlxdError", "Model",
    "ModelDraining", "ModelLoading", "ModelNotFound", "ModelState", "ModelTooLarge",
    "ModelUnloaded", "NoChatTemplate", "NoRoom", "NotAllowed", "PoisonPrompt", "Pooling",
    "PositionLogprobs", "PrefixDisk", "PrefixFolder", "PrefixStore", "Prefixes", "ProcessRole",
    "PromptEcho", "PullFailed", "PullInterrupted", "PullPhase", "PullProgress", "PulledModel",
    "QueueFull", "RankMemory", "RemoteError", "Reranking", "ResponseFormat", "SamplingOptions",
    "Score", "ScoredText", "Scores", "ShuttingDown", "Status", "StoreFull", "Stream",
    "TokenLogprob", "ToolCall", "ToolChoice", "Unloaded", "Usage", "VerifiedPrefixes", "Weights",
    "WorkerExited", "WorkerLost", "WorkerMemory", "WorkerStartFailed", "WorkerStatus",
    "WorkerTimedOut", "WrongWorker", "call_headers",
]
# fmt: on

_HOMES = (
    "mlxd._prefixes",
    "mlxd._streams",
    "mlxd.answers",
    "mlxd.client",
    "mlxd.messages",
    "mlxd_shared.domain.cache_reasons",
    "mlxd_shared.domain.chats",
    "mlxd_shared.domain.errors",
    "mlxd_shared.domain.figures",
    "mlxd_shared.domain.formats",
    "mlxd_shared.domain.pulls",
    "mlxd_shared.domain.requests",
    "mlxd_shared.security.secure_channel",
    "mlxd_shared.wire.status",
)


def __getattr__(name: str) -> object:
    """Import a public name from where it is defined; look the version up.

    Raises:
        AttributeError: it is none.
    """
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return next(vars(home)[name] for home in map(import_module, _HOMES) if name in vars(home))


def __dir__() -> list[str]:
    return sorted(__all__)
