"""Tool parsers, one for each call format of models. The registry is in answers/tool_calls.py."""
