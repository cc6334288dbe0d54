"""KeptRuns, compared with hashing each prompt completely."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.engine import ChainedHasher, keys_of
from raylm.frontend.engines import prompt_blocks as module
from raylm.frontend.engines.prompt_blocks import RUN, KeptRuns

SIZE = 4
ROOT = b"root"


def hashed(prompt: Sequence[int], root: bytes = ROOT) -> list[int]:
    hashes: list[bytes] = []
    ChainedHasher(SIZE).extend(hashes, root, list(prompt), len(prompt) // SIZE)
    return keys_of(hashes)


class Hashed:
    """Counts the blocks that are hashed one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = 0
        real = ChainedHasher.extend

        def extend(hasher: ChainedHasher, hashes: list[bytes], *rest: object) -> None:
            before = len(hashes)
            real(hasher, hashes, *rest)  # type: ignore[arg-type]
            self.blocks += len(hashes) - before

        monkeypatch.setattr(ChainedHasher, "extend", extend)

    def take(self) -> int:
        blocks, self.blocks = self.blocks, 0
        return blocks


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_keys_are_those_of_hashing_anew(data: st.DataObject) -> None:
    runs, prompt = KeptRuns(), list[int]()
    for _ in range(data.draw(st.integers(1, 5))):
        cut = data.draw(st.integers(0, len(prompt)))
        token, length = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3 * RUN * SIZE))
        prompt = prompt[:cut] + [token] * length
        root = data.draw(st.sampled_from([ROOT, b"other"]))
        tenant = data.draw(st.sampled_from(["alice", "bob"]))
        assert runs.keys(prompt, SIZE, root, tenant) == hashed(prompt, root)


def test_only_what_is_new_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, runs = Hashed(monkeypatch), KeptRuns()
    prompt = list(range(3 * RUN * SIZE + 7 * SIZE))
    runs.keys(prompt, SIZE, ROOT, "alice")
    assert counted.take() == 3 * RUN + 7
    runs.keys(prompt + [1] * SIZE, SIZE, ROOT, "alice")
    assert counted.take() == 8, "the blocks after the last whole run"
    runs.keys([*prompt[:-1], 5], SIZE, ROOT, "alice")
    assert counted.take() == 7
    changed = [*prompt[: RUN * SIZE], 9, *prompt[RUN * SIZE + 1 :]]
    runs.keys(changed, SIZE, ROOT, "alice")
    assert counted.take() == 2 * RUN + 7, "the blocks after the change"
    runs.keys(prompt, SIZE, ROOT, "bob")
    assert counted.take() == 3 * RUN + 7, "another tenant"
    runs.keys(prompt, SIZE, b"salted", "alice")
    assert counted.take() == 3 * RUN + 7, "another scope or adapter"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, runs = Hashed(monkeypatch), KeptRuns()
    monkeypatch.setattr(module, "MAX_RUNS", 2)
    first, second, third = ([number] * (RUN * SIZE) for number in range(3))
    for prompt in (first, second, first, third):
        runs.keys(prompt, SIZE, ROOT, "alice")
    counted.take()
    runs.keys(first, SIZE, ROOT, "alice")
    assert counted.take() == 0
    runs.keys(second, SIZE, ROOT, "alice")
    assert counted.take() == RUN, "the least recently used run was dropped"
