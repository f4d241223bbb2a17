"""The machine under MLX: which backend is installed, which BLAS multiplies, how many cores."""
