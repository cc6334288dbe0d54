"""Finds stop strings and markers in a text that arrives in pieces, and holds back text that may become one."""

from __future__ import annotations


class StopStrings:
    """Finds stop strings with one Knuth-Morris-Pratt automaton for each, one character at a time.

    The match that ends first wins, and the longest of those that end together. So the result does not depend on how the
    text is cut into pieces. Each character costs amortized constant time for strings of any length.
    """

    __slots__ = ("_failures", "_firsts", "_held", "_include", "_states", "_stops", "rest")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self.rest = ""  # text after the match
        self._stops = stops
        self._include = include
        self._failures = [_failure_table(stop) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._states = [0] * len(stops)
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return len(self._held)

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add the next piece of text. Returns (text that became final, matched stop string or None).

        Without ``armed`` no match may end in this piece, but one may begin in it. After a match the search starts
        again.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for place in range(len(self._held), len(buffer)):
            ended = self._advance(buffer[place])
            if ended and armed:
                stop = max(ended, key=len)
                end = place + 1
                self._states, self._held, self.rest = [0] * len(self._stops), "", buffer[end:]
                return buffer[: end if self._include else end - len(stop)], stop
        cut = len(buffer) - max(self._states)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """Return the text that is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> list[str]:
        """Advance every automaton by one character. Returns the stop strings that end here."""
        ended = []
        for which, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[which]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                ended.append(stop)
                state = failure[state - 1]
            self._states[which] = state
        return ended


class MarkerSearch:
    """Finds each occurrence of one marker. Drops white space before a marker, so it holds that back too."""

    __slots__ = ("_space", "_stops")

    def __init__(self, marker: str) -> None:
        self._stops = StopStrings((marker,), include=False)
        self._space = ""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may still be dropped."""
        return len(self._space) + self._stops.num_held

    def push(self, text: str) -> tuple[str, str | None]:
        """Add the next piece of text. Returns (text that became final, text after the marker or None)."""
        text, found = self._stops.push(text)
        text = self._space + text
        final = text.rstrip()
        self._space = text[len(final) :] if found is None else ""
        return final, None if found is None else self._stops.rest

    def flush(self) -> str:
        held, self._space = self._space + self._stops.flush(), ""
        return held


def _failure_table(stop: str) -> list[int]:
    """The length of the longest proper border of each prefix of ``stop``."""
    table = [0] * len(stop)
    border = 0
    for place in range(1, len(stop)):
        while border and stop[place] != stop[border]:
            border = table[border - 1]
        border += stop[place] == stop[border]
        table[place] = border
    return table
