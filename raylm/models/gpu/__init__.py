"""What a decoder computes between its products, on NVIDIA GPUs: one launch where torch has several."""
