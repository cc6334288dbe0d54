"""Quantized checkpoints, and quantization of weights during loading."""
