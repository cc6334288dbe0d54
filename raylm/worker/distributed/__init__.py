"""The ranks of a tensor-parallel engine: rendezvous and process group."""
