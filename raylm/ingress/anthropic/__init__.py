"""Anthropic's messages API, which comes down to chat completions."""
