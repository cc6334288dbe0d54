"""The version of RayLM, which `pyproject.toml` repeats."""

VERSION = "0.1.0"
