"""What shape an answer has and how it is read: grammars, tool calls, reasoning."""
