"""Probes of what a stream tells beside one output: the prompt, and other choices of it."""

from __future__ import annotations

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.system.wire.probe import Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering


@covering("GenerateRequest.echo", "GenerateRequest.prompt_logprobs")
async def the_prompt_is_told(wire: Wire) -> None:
    """Its text and ids, and how likely each token is; more than a message holds is refused."""
    first, *others = await wire.generate(text="Once upon", echo=True, prompt_logprobs=1)
    tokenized = await wire.inference.Tokenize(
        inference_pb2.TokenizeRequest(model=wire.model, text="Once upon")
    )
    assert first.prompt.text == "Once upon"
    assert first.prompt.token_ids == tokenized.token_ids
    ids = [position.chosen.token_id for position in first.prompt.logprobs]
    assert ids == list(tokenized.token_ids)[1:]
    assert all(len(position.top) == 1 for position in first.prompt.logprobs)
    assert not any(message.HasField("prompt") for message in others)
    error = await refusal(wire.generate(prompt_logprobs=21))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "prompt_logprobs"


@covering("GenerateRequest.n")
async def several_choices_of_one_prompt(wire: Wire) -> None:
    """Each with the draws of its own seed, a whole stream each; the prompt is counted once."""
    sampling = types_pb2.SamplingOptions(temperature=1, seed=7)
    messages = await wire.generate(n=3, sampling=sampling)
    choices: list[list[int]] = [[], [], []]
    for message in messages:
        choices[message.choice] += message.token_ids
    for choice, ids in enumerate(choices):
        sampling.seed = 7 + choice
        assert await wire.ids(sampling=sampling) == ids
    ends = [message for message in messages if message.HasField("finish")]
    assert len(ends) == 3
    assert sum(end.usage.prompt_tokens > 0 for end in ends) == 1
