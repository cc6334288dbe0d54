"""The `raylm` command."""
