"""A direct implementation of Drafts: every occurrence of an n-gram is compared token by token, without hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

LENGTHS = (16, 8, 4, 3, 2, 1)
# The expected number of accepted drafts of ten, by the kind and the length of the match.
EXPECTED = {
    **{("own", size): most for size, most in zip(LENGTHS, (8, 7.5, 6, 5, 3, 1), strict=True)},
    **{("answer", size): most for size, most in zip(LENGTHS, (8, 7, 5, 3.5, 2, 0.7), strict=True)},
    ("kept", 0): 9,
    ("resumed", 0): 2,
    ("answer kept", 0): 9,
}
Kind = tuple[str, int]


def votes(texts: list[list[int]], gram: list[int]) -> tuple[int, int] | None:
    """(text, position) after the chosen occurrence of ``gram``. The occurrences vote one after the other."""
    chosen, count, size = None, 0, len(gram)
    for number, text in enumerate(texts):
        for at in range(size, len(text)):
            if text[at - size : at] != gram:
                continue
            if chosen is None or texts[chosen[0]][chosen[1]] == text[at]:
                chosen, count = (number, at), min(count + 1, 4)
            elif (count := count - 1) == 0:
                chosen, count = (number, at), 1
    return chosen


def match(texts: list[list[int]], tail: list[int]) -> tuple[int, tuple[int, int]] | None:
    """The longest match of the end of ``tail``: its length, and the (text, position) from which to copy."""
    for size in LENGTHS:
        if len(tail) >= size and (found := votes(texts, tail[-size:])):
            return size, found
    return None


@dataclass
class Row:
    owner: int
    kind: Kind | None = None
    lag: int = 0
    source: tuple[int, int] = (0, 0)
    made_at: int = 0
    drafts: list[int] = field(default_factory=list)
    right: float = 0.0
    tested: float = 0.0


class Reference:
    def __init__(self, most: int) -> None:
        self.most = most
        self.rows: dict[int, Row] = {}
        self.answers: list[tuple[int, list[int]]] = []
        self.right = dict.fromkeys(EXPECTED, 0.0) | EXPECTED
        self.tested = dict.fromkeys(EXPECTED, 10.0)

    def keep(self, row: int, text: list[int], prompt: int) -> None:
        if len(text) - prompt >= 8:
            self.answers.append((self.rows[row].owner, text[max(0, prompt - 16) :]))

    def renew(self, number: int, text: list[int]) -> tuple[list[int], float]:
        """The drafts of a row after its text has grown, and the chance of the first draft."""
        row = self.rows[number]
        self._learn(row, text)
        if row.kind is None:
            self._find(row, text)
        row.made_at, row.drafts = len(text), []
        if row.kind and row.kind[0].startswith("answer"):
            answer, at = row.source
            row.drafts = self.answers[answer][1][at : at + self.most]
        elif row.kind:
            row.drafts = (text[-row.lag :] * self.most)[: self.most]
        if not row.drafts:
            row.kind = None
        if row.kind is None:
            return [], 0.0
        expected = self.right[row.kind] / self.tested[row.kind]
        return row.drafts, (row.right + 3 * expected) / (row.tested + 3)

    def _learn(self, row: Row, text: list[int]) -> None:
        came = text[row.made_at :]
        looked_at = list(zip(row.drafts, came, strict=False))
        right = next((at for at, (draft, token) in enumerate(looked_at) if draft != token), len(looked_at))
        tested = min(right + 1, len(looked_at))
        row.right, row.tested = row.right * 0.8 + right, row.tested * 0.8 + tested
        kind = row.kind
        if kind is None:
            row.lag = 0
            return
        self.right[kind] += right
        self.tested[kind] += tested
        if self.tested[kind] > 256:
            self.right[kind] /= 2
            self.tested[kind] /= 2
        from_answer = kind[0].startswith("answer")
        over = from_answer and len(came) >= len(row.drafts) and len(row.drafts) < self.most
        held = right == len(looked_at) and not over
        row.kind = ("answer kept" if from_answer else "kept", 0) if held else None
        row.source = row.source[0], row.source[1] + len(came)
        if not held and kind[0] != "kept":
            row.lag = 0

    def _find(self, row: Row, text: list[int]) -> None:
        own: Kind | None = ("resumed", 0) if row.lag else None
        lag = row.lag
        if found := match([text], text):
            own, lag = ("own", found[0]), len(text) - found[1][1]
        theirs = [number for number, (owner, _) in enumerate(self.answers) if owner == row.owner]
        found = match([self.answers[number][1] for number in theirs], text)
        answer = ("answer", found[0]) if found else None
        if answer and (own is None or self._expected(answer) > self._expected(own)):
            assert found is not None
            row.kind, row.lag, row.source = answer, 0, (theirs[found[1][0]], found[1][1])
        else:
            row.kind, row.lag = own, lag

    def _expected(self, kind: Kind) -> float:
        return self.right[kind] / self.tested[kind]
