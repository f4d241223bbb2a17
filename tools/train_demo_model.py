"""Train, evaluate and sample the demo model.

    python tools/train_demo_model.py --data DIR --out DIR            all of it
    python tools/train_demo_model.py --data DIR --prepared DIR --prepare-only
    python tools/train_demo_model.py --prepared DIR --out DIR        train on prepared text
    python tools/train_demo_model.py --prepared DIR --first DIR --out DIR    its second stage alone
    python tools/train_demo_model.py --data DIR --out DIR --evaluate score a written folder (CPU)
    python tools/train_demo_model.py --out DIR --sample              let it write

`--data` is the folder that holds corpus/stories.jsonl.xz. Training takes minutes on a GPU and
days on a CPU; everything else runs on a CPU.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from demo_training.chats.answers import answers, judge
from demo_training.chats.requests import judged_requests, sample_of_requests
from demo_training.corpus import Story, held_out_stories
from demo_training.evaluate import evaluate, sample_of
from demo_training.export import (
    FOLDER_NBYTES_MAX,
    folder_nbytes,
    read_stage,
    record_scores,
    recorded_names,
    run_facts,
    write_facts,
    write_model,
)
from demo_training.prepared import load_prepared, prepare
from demo_training.sample import print_samples
from demo_training.shape import Shape
from demo_training.tokens import token_stream
from demo_training.train import Chats, Recipe, train, train_chats


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sample:
        print_samples(_require(parser, options.out, "--out"))
    elif options.evaluate:
        stories = held_out_stories(_require(parser, options.data, "--data"))
        _record(_require(parser, options.out, "--out"), stories)
    elif options.evaluate_sample:
        stories = held_out_stories(_require(parser, options.data, "--data"))
        score = evaluate(_require(parser, options.out, "--out"), sample_of(stories))
        print(json.dumps(asdict(score)))
    elif options.evaluate_requests:
        folder = _require(parser, options.out, "--out")
        requests = sample_of_requests(judged_requests(recorded_names(folder)))
        written = answers(folder, requests)
        print(json.dumps(asdict(judge(requests, written))))
    elif options.prepare_only:
        data = _require(parser, options.data, "--data")
        prepare(data, _require(parser, options.prepared, "--prepared"))
    elif options.prepared is not None and options.data is None:
        _train(options.prepared, _require(parser, options.out, "--out"), options)
    else:
        data, out = _require(parser, options.data, "--data"), _require(parser, options.out, "--out")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if options.prepared is None else options.prepared
            prepare(data, folder)
            _train(folder, out, options)


def _train(prepared_folder: Path, out: Path, options: argparse.Namespace) -> None:
    prepared, shape = load_prepared(prepared_folder), Shape()
    chosen = {field.name: vars(options)[field.name] for field in fields(Recipe)}
    recipe = replace(Recipe(), **{name: v for name, v in chosen.items() if v is not None})
    held_out = token_stream(prepared.tokenizer, [story.text for story in prepared.held_out])
    limit = options.steps_max
    if options.first is None:
        first = train(prepared.stream, held_out, shape, recipe, steps_max=limit)
        parameters, facts = first.parameters, run_facts(first)
    else:
        parameters, facts = read_stage(options.first, shape)
    chats = Chats(prepared.chat_windows, prepared.chat_marks)
    outcome = train_chats(
        parameters, prepared.stream, chats, held_out, shape, recipe, steps_max=limit
    )
    write_model(out, prepared, shape, outcome)
    write_facts(out, prepared, shape, recipe, (facts, run_facts(outcome)))
    size = folder_nbytes(out)
    if size > FOLDER_NBYTES_MAX:
        raise SystemExit(f"{out} holds {size} bytes, over the limit of {FOLDER_NBYTES_MAX}")
    if not options.train_only:
        _record(out, prepared.held_out)


def _record(out: Path, held_out: Sequence[Story]) -> None:
    score, judged = record_scores(out, held_out)
    print(f"{score.bits_per_byte:.4f} bits a byte over {score.stories} held-out stories")
    print(f"of {judged.requests} requests {judged.named} named, {judged.ended} ended by themselves")


def _require(parser: argparse.ArgumentParser, path: Path | None, flag: str) -> Path:
    if path is None:
        parser.error(f"{flag} is needed for this")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the corpus")
    parser.add_argument("--prepared", type=Path, help="folder of the prepared corpus")
    parser.add_argument("--out", type=Path, help="model folder")
    parser.add_argument("--prepare-only", action="store_true", help="stop before training")
    parser.add_argument("--train-only", action="store_true", help="leave scoring for later")
    parser.add_argument("--evaluate", action="store_true", help="score the folder --out")
    parser.add_argument("--evaluate-sample", action="store_true", help="only look; print JSON")
    parser.add_argument("--evaluate-requests", action="store_true", help="likewise, answers")
    parser.add_argument("--first", type=Path, help="folder whose weights the second stage takes")
    parser.add_argument("--sample", action="store_true", help="print continuations of --out")
    parser.add_argument("--steps-max", type=int, help="cut the run short, for a trial")
    for field in fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        choices = ("muon", "adamw") if field.name == "optimiser" else None
        parser.add_argument(flag, type=type(field.default), choices=choices, help="recipe")
    return parser


if __name__ == "__main__":
    main()
