"""OpenAI's Responses API, implemented by conversion to chat completions, and the store of responses."""
