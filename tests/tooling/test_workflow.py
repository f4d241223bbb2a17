"""The GitHub workflow: well-formed, pinned, bounded, and running what the tree has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
CHECK = Path(sys.executable).parent / "check-jsonschema"
TIMEOUT_S = 60


def jobs() -> dict[str, dict[str, Any]]:
    """The jobs by name."""
    workflow_jobs = YAML(typ="safe").load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    assert isinstance(workflow_jobs, dict)
    return workflow_jobs


def steps(key: str) -> list[str]:
    """What all steps say under a key."""
    return [step[key] for job in jobs().values() for step in job["steps"] if key in step]


@pytest.mark.parametrize(
    "schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"]
)
def test_the_workflow_keeps_the_schema(schema: str) -> None:
    """GitHub would accept the file, and no job can hang for hours."""
    done = subprocess.run(
        [str(CHECK), "--builtin-schema", schema, str(WORKFLOW)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr


def test_both_platforms_are_proved() -> None:
    """Linux runs everything, and Apple silicon the tests."""
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs().items()}

    assert jobs()["linux"]["runs-on"] == "ubuntu-latest"
    assert jobs()["macos"]["runs-on"] == "macos-14"
    assert ".ci/run" in runs["linux"]
    assert {"make demo", "make tools", "make test"} <= set(runs["macos"])


def test_no_test_skips_unseen() -> None:
    """Nothing takes the variable CI away, which GitHub sets: where it is, unlisted skips fail."""
    whole = WORKFLOW.read_text(encoding="utf-8")

    assert not re.search(r"\bCI\s*[:=]", whole)
    assert "unset CI" not in whole


def test_actions_are_pinned() -> None:
    """An action is a full commit, which nobody can move as one can move a tag."""
    uses = steps("uses")

    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", use)] == []


def test_what_is_run_exists() -> None:
    """Every file and every target that a step names is in the tree."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", text, flags=re.MULTILINE))
    runs = "\n".join(steps("run"))
    files = re.findall(r"(?:-f |^)([\w./-]+/[\w./-]+)", runs, flags=re.MULTILINE)

    assert set(re.findall(r"\bmake ([a-z-]+)", runs)) <= targets
    assert ".ci/run" in files
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_a_job_may_read_and_no_more() -> None:
    """The workflow's token cannot write to the repository."""
    whole = YAML(typ="safe").load(WORKFLOW.read_text(encoding="utf-8"))

    assert whole["permissions"] == {"contents": "read"}
