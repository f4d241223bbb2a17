"""Products with weights of 4 bits by kernels of our own, where MLX has slower ones: on CUDA."""
