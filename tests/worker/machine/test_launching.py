"""When kernels are launched by themselves, and who has the last word."""

from __future__ import annotations

import pytest

from mlxd_worker.machine.launching import (
    GRAPHS_VARIABLE,
    LARGE_NBYTES,
    MANY_ROWS,
    choose_launching,
)


@pytest.mark.parametrize(
    ("weights_nbytes", "rows_max", "alone"),
    [
        (LARGE_NBYTES - 1, MANY_ROWS - 1, False),
        (LARGE_NBYTES, 1, True),
        (1, MANY_ROWS, True),
        (1, 1, False),
    ],
)
def test_large_models_and_many_rows_have_no_graphs(
    weights_nbytes: int, rows_max: int, *, alone: bool
) -> None:
    """MLX reads the variable as a number: 0 is without."""
    environ: dict[str, str] = {}

    choose_launching(environ, weights_nbytes=weights_nbytes, rows_max=rows_max)

    assert environ == {GRAPHS_VARIABLE: "0" if alone else "1"}


@pytest.mark.parametrize(("weights_nbytes", "alone"), [(1, False), (LARGE_NBYTES, True)])
def test_where_all_products_are_nodes_many_rows_have_graphs(
    weights_nbytes: int, *, alone: bool
) -> None:
    """Unless the device takes longer than any host would."""
    environ: dict[str, str] = {}

    choose_launching(environ, weights_nbytes=weights_nbytes, rows_max=MANY_ROWS, captures=False)

    assert environ == {GRAPHS_VARIABLE: "0" if alone else "1"}


@pytest.mark.parametrize("said", ["0", "1"])
def test_what_the_environment_says_stands(said: str) -> None:
    """Whoever runs the worker decides, for whatever model."""
    environ = {GRAPHS_VARIABLE: said}

    for rows_max in (1, MANY_ROWS):
        choose_launching(environ, weights_nbytes=1, rows_max=rows_max)
    assert environ == {GRAPHS_VARIABLE: said}
