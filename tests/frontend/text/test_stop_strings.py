"""Stop strings, compared with brute force: the text up to the match that ends first, however the text is cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from raylm.frontend.text.stop_strings import StopStrings

SOME = st.text(alphabet="ab€", max_size=24)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def brute_force(text: str, stops: tuple[str, ...], include: bool, unarmed: int) -> tuple[str, str | None]:
    """Try every prefix of the text, the shortest first. No match may end within the first ``unarmed`` characters."""
    for end in range(unarmed + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], include: bool, unarmed_pieces: int) -> tuple[list[str], str | None]:
    strings = StopStrings(stops, include=include)
    out = []
    for place, piece in enumerate(pieces):
        final, stop = strings.push(piece, armed=place >= unarmed_pieces)
        out.append(final)
        if stop is not None:
            return out, stop
    return [*out, strings.flush()], None


@given(st.lists(SOME, max_size=8), STOPS, st.booleans(), st.integers(0, 4))
@example(["aab"], ("aaab", "b"), False, 0)
@example(["aa", "ab"], ("aab",), False, 0)
@example(["ab", "a"], ("aba", "b"), True, 1)
def test_equals_brute_force(pieces: list[str], stops: tuple[str, ...], include: bool, unarmed_pieces: int) -> None:
    unarmed = len("".join(pieces[:unarmed_pieces]))
    out, stop = run(pieces, stops, include, unarmed_pieces)
    assert ("".join(out), stop) == brute_force("".join(pieces), stops, include, unarmed)


@given(SOME, STOPS)
def test_holds_back_no_more_than_what_may_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    strings = StopStrings(stops, include=False)
    final, stop = strings.push(text)
    if stop is None:
        held = text[len(final) :]
        ends = [text[start:] for start in range(len(text)) if any(s.startswith(text[start:]) for s in stops)]
        assert held == max(ends, key=len, default="")


def test_without_a_first_character_everything_passes_at_once() -> None:
    strings = StopStrings(("END",), include=False)
    assert strings.push("hello ") == ("hello ", None)
    assert strings.push("EN") == ("", None)
    assert strings.push("tire") == ("ENtire", None)
    assert strings.push("EN") == ("", None)
    assert strings.push("D more") == ("", "END")
