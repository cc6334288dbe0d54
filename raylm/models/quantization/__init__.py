"""Quantized checkpoints and weights that are quantized when they are loaded."""
