"""Code for GPUs: attention over pages, CUDA graphs, asynchronous decoding."""
