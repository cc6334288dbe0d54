"""What only a GPU needs: xformers' attention, CUDA graphs, asynchronous decoding."""
