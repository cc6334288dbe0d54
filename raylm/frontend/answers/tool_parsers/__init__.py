"""Tool parsers, one for each way in which models write calls, entered by the registry in answers/tool_calls.py."""
