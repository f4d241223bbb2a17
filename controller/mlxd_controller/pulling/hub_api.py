"""All use of huggingface_hub, which only the extra `hub` installs.

It is imported on use, so that the base install works without it. Its errors end here: each becomes
one of mlxd's, with a message of our own that says what helps.
"""

from __future__ import annotations

import errno
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mlxd_controller.pulling.choosing import RemoteFile
from mlxd_shared.domain.errors import (
    ExtraMissing,
    HubDenied,
    HubUnavailable,
    MlxdError,
    ModelNotFound,
    PullFailed,
    PullInterrupted,
    StoreFull,
)

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

ANSWER_TIMEOUT_S = 30.0
_SIGN_IN = "sign in with `hf auth login`, or set HF_TOKEN"
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TRANSPORTS = frozenset({"httpcore", "httpcore2", "httpx", "httpx2"})


@dataclass(frozen=True, slots=True)
class RemotePart:
    """Where a file's bytes are. `plain`: they can be requested from any byte on.

    The URL may contain credentials: errors show only the name.
    """

    name: str
    url: str
    etag: str
    nbytes: int | None
    plain: bool


class Hub:
    """A hub: an endpoint and a token. Used by one thread."""

    def __init__(self, *, endpoint: str | None = None, token: str | None = None) -> None:
        """Override the library's environment; nothing is requested yet.

        Raises:
            ExtraMissing: the library is not installed.
        """
        if importlib.util.find_spec("huggingface_hub") is None:
            raise ExtraMissing("pulling", "hub")
        self._endpoint = None if endpoint is None else endpoint.rstrip("/")
        self._token = token
        self.reporting: Callable[[int], None] = lambda _: None
        """Called with the number of bytes that have arrived since its last call."""

    def listing(self, repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
        """Return a revision's commit and files."""
        from huggingface_hub import HfApi  # noqa: PLC0415

        with _in_our_words(repository, revision):
            info = HfApi(endpoint=self._endpoint, token=self._token).model_info(
                repository, revision=revision, files_metadata=True, timeout=ANSWER_TIMEOUT_S
            )
            return info.sha or "", [_remote_file(sibling) for sibling in info.siblings or ()]

    def part(self, repository: str, name: str, commit: str) -> RemotePart:
        """Return where a file's bytes are."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

        with _in_our_words(repository, commit):
            url = hf_hub_url(repository, name, revision=commit, endpoint=self._endpoint)
            metadata = get_hf_file_metadata(
                url, token=self._token, timeout=ANSWER_TIMEOUT_S, endpoint=self._endpoint
            )
            etag = metadata.etag or ""
            if not _HASH.fullmatch(etag):
                raise PullFailed(f"the hub says the hash of {name} is {etag!r:.80}, not a hash")
            plain = metadata.xet_file_data is None
            return RemotePart(name, metadata.location, etag, metadata.size, plain=plain)

    def download(self, part: RemotePart, stream: BinaryIO, begun_nbytes: int) -> None:
        """Append what is missing of a file to `stream`, which has its first bytes."""
        from huggingface_hub.file_download import http_get  # noqa: PLC0415
        from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415

        with _in_our_words(part.name, ""):
            http_get(
                part.url,
                stream,
                resume_size=begun_nbytes,
                headers=build_hf_headers(token=self._token) if self._ours(part.url) else {},
                expected_size=part.nbytes,
                tqdm_class=self._counter(),
            )

    def place(self, repository: str, name: str, commit: str, cache: Path) -> None:
        """Put a file of Xet storage into the commit's snapshot, downloading it if need be."""
        from huggingface_hub import hf_hub_download  # noqa: PLC0415

        with _in_our_words(repository, commit):
            hf_hub_download(
                repository,
                name,
                revision=commit,
                cache_dir=cache,
                endpoint=self._endpoint,
                token=self._token,
                tqdm_class=self._counter(),
            )

    def _ours(self, url: str) -> bool:
        """Return whether a URL is the hub's own, the only one to receive the token."""
        from huggingface_hub.constants import ENDPOINT  # noqa: PLC0415

        return url.startswith(f"{self._endpoint or ENDPOINT}/")

    def _counter(self) -> Any:  # noqa: ANN401 - a class of a library without types
        """Return the class of an invisible progress bar that reports to `reporting`."""
        from tqdm import tqdm  # noqa: PLC0415

        reporting = self.reporting

        class Counter(tqdm):  # type: ignore[misc]
            """Counts."""

            def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> None:
                """Report how many bytes have arrived."""
                reporting(int(n or 0))

            def update_transfer(self, n: float) -> None:
                """Ignore what Xet storage transfers: only the resulting bytes count."""

        return Counter


def _remote_file(sibling: Any) -> RemoteFile:  # noqa: ANN401 - of a library that checks nothing
    """Return a file of a listing; size and hash are used only if valid."""
    if not isinstance(sibling.rfilename, str):
        raise PullFailed(f"the hub lists a file {sibling.rfilename!r:.80}, which is not a name")
    nbytes = sibling.size if type(sibling.size) is int and sibling.size > 0 else 0
    content = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    known = isinstance(content, str) and _HASH.fullmatch(content)
    return RemoteFile(sibling.rfilename, nbytes, content if known else "")


@contextmanager
def _in_our_words(repository: str, revision: str) -> Iterator[None]:
    """Turn the library's errors around the body into ours."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        yield
    except MlxdError:
        raise
    except Exception as error:
        for kind, ours in _known_errors(repository, revision):
            if isinstance(error, kind):
                raise ours from error
        if isinstance(error, HfHubHTTPError):
            raise _refusal(error, repository) from error
        if isinstance(error, OSError):
            raise error_of_system(error) from error
        if type(error).__module__.partition(".")[0] not in _TRANSPORTS:
            raise
        raise HubUnavailable(f"no answer from the hub: {error}") from error


def _known_errors(repository: str, revision: str) -> list[tuple[type[Exception], MlxdError]]:
    """Return the library's errors and ours; subclasses come first."""
    from huggingface_hub import errors as e  # noqa: PLC0415

    gated = f"{repository} is gated: accept its terms on the hub, then {_SIGN_IN}"
    unknown = f"the hub has none, or not for you: if it is private, {_SIGN_IN}"
    revised = ModelNotFound(f"{repository}@{revision}", "the hub has no such revision of it")
    return [
        (e.GatedRepoError, HubDenied(gated)),
        (e.RevisionNotFoundError, revised),
        (e.RepositoryNotFoundError, ModelNotFound(repository, unknown)),
        (e.EntryNotFoundError, ModelNotFound(repository, "the hub no longer has one of its files")),
        (e.HFValidationError, ModelNotFound(repository, "it is not ORG/NAME")),
        (e.OfflineModeIsEnabled, HubUnavailable("HF_HUB_OFFLINE forbids access to the hub")),
    ]


def _refusal(error: HfHubHTTPError, subject: str) -> PullFailed:
    status = error.response.status_code
    if status in (401, 403):
        return HubDenied(f"the hub denies you access to {subject} ({status}): {_SIGN_IN}")
    if status == 404:
        return PullFailed(f"the hub has no {subject}")
    return HubUnavailable(f"the hub answers {status} about {subject}")


def error_of_system(error: OSError) -> PullFailed:
    """Return the error that one of the disk or the system is."""
    if error.errno is None:  # raised by the library for an unexpected length
        return PullInterrupted("a file arrived incomplete; pull again")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk is full; what has arrived stays for the next pull")
    return PullFailed(f"{error.filename or 'the download'}: {error.strerror or error}")
