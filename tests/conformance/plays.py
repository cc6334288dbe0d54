"""The words that stand in a play in place of a call: a text, an answer that never comes, a connection that is cut."""

SAY, WAIT, CUT = "@say", "@wait", "@cut"
