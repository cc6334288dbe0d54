"""OpenAI's Responses API, which comes down to chat completions, and the store of responses."""
