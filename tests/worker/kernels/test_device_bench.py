"""The comparison for GPUs runs from end to end, also where its figures mean nothing."""

from __future__ import annotations

import json

from tests.bench.device import arguments, lines


def test_the_gpu_comparison_reports_every_figure_it_is_judged_by() -> None:
    """Both sides decode the same packed model, alone and side by side, to the same tokens."""
    argv = ["--model", "tiny", "--forms", "q4", "--batches", "1", "2", "--prompt", "16"]
    sizes = ["--steps", "4", "--warm-steps", "2", "--rounds", "1", "--copy-mib", "4", "--check"]

    figures = {
        line["key"]: line["value"]
        for line in map(json.loads, lines(arguments([*argv, *sizes, "--parts", "--ahead", "32"])))
    }

    for rows in (1, 2):
        key = f"device.tiny.q4.b{rows}"
        for side in ("ours", "peer"):
            assert figures[f"{key}.{side}_tokens_per_s"] > 0
            assert figures[f"{key}.{side}_peak_gib"] > 0
        ratio = figures[f"{key}.peer_step_ms"] / figures[f"{key}.ours_step_ms"]
        assert abs(figures[f"{key}.ratio_tokens_per_s"] - ratio) < 1e-9
        assert figures[f"{key}.tokens_alike"] >= 4
        assert figures[f"{key}.logits_difference"] < 1e-3
        assert figures[f"{key}.part.step_ahead_ms"] > 0
        assert figures[f"{key}.t32.ahead_peak_nbytes"] > 0
