"""How well documents fit a query: asked of a reranker, or measured between vectors.

Invariants:
- A model whose files say how texts become vectors ranks by the cosine of query and document; any
  other one is asked about each document, by its chat template, and ranks by how much likelier it
  finds "yes" than "no".
- Equal documents keep their order.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from mlxd import Client, Embeddings, MlxdError, Reranking, ScoredText, Scores
from mlxd_gateway.common.failures import BadField, Refused, failure_of

ANSWERS = ("yes", "no")
_PLACE = re.compile(r"texts\[(?P<index>\d+)\]")


@dataclass(frozen=True, slots=True)
class Ranking:
    """How relevant each document is, in the order of the request, and the tokens read for it."""

    relevances: tuple[float, ...]
    prompt_tokens: int

    def best(self, count: int | None) -> list[int]:
        """Return the indexes of the `count` most relevant documents, best first; None: of all."""
        relevances = self.relevances
        order = sorted(range(len(relevances)), key=relevances.__getitem__, reverse=True)
        return order[:count]


async def rank(
    client: Client, model: str, reranking: Reranking, documents: Sequence[str]
) -> Ranking:
    """Return how relevant documents are to a query, by the model's own way.

    Raises:
        BadField: an instruction, for a model that takes none; or the model has no way.
        Refused: the model failed; fields are named as the request names them.
        MlxdError: there is no such model, or nobody who knows.
    """
    known = await client.model(model)
    if not (known.has_pooling or known.has_chat_template):
        problem = f"{known.name} has neither a chat template nor a pooling: it ranks nothing"
        raise BadField("model", problem)
    try:
        if not known.has_pooling:
            texts = [ScoredText(document, ANSWERS) for document in documents]
            return judge(await client.scores(texts, model=model, reranking=reranking))
        if reranking.instruction:
            problem = f"{known.name} compares vectors: say it in the query, as its card does"
            raise BadField("instruct", problem)
        made = await client.embeddings([reranking.query, *documents], model=model, normalize=True)
    except MlxdError as error:
        rename = name_vector if known.has_pooling else name_score
        raise Refused(failure_of(error, rename)) from error
    return await asyncio.to_thread(measure, made)  # a million products, for long vectors


def name_score(field: str) -> str:
    """Return the request's name of a field of a question to a reranker."""
    place = _PLACE.match(field)
    if place is not None:
        return f"documents[{place['index']}]"
    names = {"reranking.query": "query", "reranking.instruction": "instruct", "texts": "documents"}
    return names.get(field, field)


def name_vector(field: str) -> str:
    """Return the request's name of a text that was to become a vector: the query is the first."""
    place = _PLACE.match(field)
    if place is None:
        return "documents" if field == "texts" else field
    index = int(place["index"])
    return f"documents[{index - 1}]" if index else "query"


def judge(scores: Scores) -> Ranking:
    """Return the share of "yes" in the two answers' probabilities, of each document."""
    shares = (_share(yes.logprob - no.logprob) for yes, no in scores.scores)
    return Ranking(tuple(shares), scores.prompt_tokens)


def measure(made: Embeddings) -> Ranking:
    """Return the cosine of each vector with the first, all of length 1."""
    query, *documents = made.vectors
    cosines = (sum(map(mul, query, document)) for document in documents)
    return Ranking(tuple(cosines), made.prompt_tokens)


def _share(margin: float) -> float:
    """Return the logistic function of a difference of log-probabilities."""
    return 1 / (1 + math.exp(-margin)) if margin >= 0 else math.exp(margin) / (1 + math.exp(margin))
