"""What only a GPU needs: CUDA graphs, and decoding ahead of the host."""
