"""OpenAI's API, and endpoints of vLLM."""
