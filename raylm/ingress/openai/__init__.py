"""OpenAI's API, and vLLM's endpoints beside it."""
