"""The form of an answer and the parsing of its text: grammars, tool calls, reasoning."""
