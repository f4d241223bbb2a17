"""Side-by-side measurements against mlx-lm in the same run; `make bench`. Never a test."""
