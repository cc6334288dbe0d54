"""Anthropic's messages API, implemented by conversion to chat completions."""
