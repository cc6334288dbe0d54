"""The ranks of a tensor-parallel engine: rendezvous, process group, sampling on rank 0."""
