"""The version of RayLM. `pyproject.toml` has the same."""

VERSION = "0.2.0"
