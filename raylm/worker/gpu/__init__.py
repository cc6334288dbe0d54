"""Code for GPUs: xformers' attention, CUDA graphs, asynchronous decoding."""
