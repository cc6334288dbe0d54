"""Fused elementwise operations of a decoder on NVIDIA GPUs."""
