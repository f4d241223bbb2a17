"""The requests of Cohere's API and of Jina's: each field once, with what becomes of it.

Jina's fields are some of Cohere's. `instruct` is what clients of other servers of this API send.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, honour, pass_over, turn_down
from mlxd_shared import config

WHOLE = "documents are read whole; one that the context cannot hold is refused"


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document that is an object."""

    text: str


Documents = Annotated[
    list[str | Document], msgspec.Meta(min_length=1, max_length=config.RERANK_DOCUMENTS_MAX)
]


class _Ranking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    query: str
    documents: Annotated[
        Documents, honour(f"1 to {config.RERANK_DOCUMENTS_MAX}: texts, or objects with a text")
    ]
    model: str = ""
    top_n: Annotated[int | None, honour("so many of the best, at least 1; null: all")] = None
    instruct: Annotated[
        str | None, honour("not of Cohere's: what a document is to be; not with a pooling's model")
    ] = None
    return_documents: Annotated[bool | None, honour("with each result its text; else none")] = None
    max_chunks_per_doc: Annotated[Raw, pass_over(WHOLE)] = ABSENT
    max_tokens_per_doc: Annotated[Raw, pass_over(WHOLE)] = ABSENT
    rank_fields: Annotated[
        list[str] | None, turn_down("a document is its text", neutral=(["text"],))
    ] = None


class RerankRequest(_Ranking, kw_only=True):
    """POST /v1/rerank, of Cohere's API and of Jina's."""


class NewRerankRequest(_Ranking, kw_only=True):
    """POST /v2/rerank, Cohere's newer form."""

    priority: Annotated[Raw, pass_over("requests are served in turn")] = ABSENT
