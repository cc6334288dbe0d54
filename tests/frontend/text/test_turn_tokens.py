"""TurnTokens, compared with tokenizing the whole text, for all kinds of tokenizers; and the stored parts by owner."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import AsyncLLM, ChatRequest
from raylm.frontend.text import turn_tokens as module
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.text.turn_tokens import TurnTokens, markers_of
from raylm.params import SamplingParams
from tests.checkpoints import make_tokenizer
from tests.frontend.checkpoints import byte_fallback, byte_level, write_checkpoint

MARKER = "<|im_start|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>"]
ADDED = [
    AddedToken("<|right|>", rstrip=True, special=True),
    AddedToken("<|left|>", lstrip=True, special=True),
    AddedToken("<|word|>", single_word=True, special=True),
    AddedToken("word", single_word=True),
    AddedToken("<think>", normalized=True),
    AddedToken("<tool>", normalized=False),
    AddedToken("<tool>s", normalized=False),
    AddedToken("##", normalized=False),
    AddedToken("#<|hash|>", normalized=False),
    AddedToken("<|hash|>", normalized=False),
    AddedToken("name|", normalized=False),
    AddedToken("|after", normalized=False),
    AddedToken("   ", normalized=False),
]
SAMPLES = ["the quick brown fox", " hello   world \n\n", "ÀÉ wörld €", "12345", "a|b name|after ## #<|hash|>s words"]


def _trained(name: str) -> Backend:
    """A tokenizer of one kind: model, normalizer and pre-tokenizer. Some depend on the text around a piece."""
    model, normalizer, cut = KINDS[name]
    backend = Backend(model())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = cut
    options = {"vocab_size": 400, "special_tokens": SPECIAL, "show_progress": False}
    if isinstance(backend.model, models.BPE):
        alphabet = pre_tokenizers.ByteLevel.alphabet() if "bytes" in name else []
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    elif isinstance(backend.model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    elif isinstance(backend.model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(**options)
    else:
        trainer = trainers.WordLevelTrainer(**options)
    backend.train_from_iterator([*SAMPLES, *"abcdefghijklmnopqrstuvwxyz|<>#_"], trainer)
    backend.add_tokens(ADDED)
    return backend


_SPLIT = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
KINDS = {
    "bytes": (models.BPE, None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, led by a space": (models.BPE, normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes, split by a regex": (
        models.BPE, None,
        pre_tokenizers.Sequence([_SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    ),
    "pieces, only the first led": (
        models.Unigram, normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "pieces, each led": (models.Unigram, None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "pieces, stripped": (models.Unigram, normalizers.Strip(), pre_tokenizers.Metaspace(prepend_scheme="never")),
    "words in lower case": (
        lambda: models.WordPiece(unk_token="<unk>"), normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "characters, led": (lambda: models.BPE(unk_token="<unk>"), normalizers.Prepend("▁"), pre_tokenizers.Whitespace()),
    "words": (lambda: models.WordLevel(unk_token="<unk>"), None, pre_tokenizers.Punctuation()),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tokenizer]]:
    known: dict[str, Tokenizer] = {}

    def make(name: str) -> Tokenizer:
        if name not in known:
            path = tmp_path_factory.mktemp("tokenizer")
            if name == "embedded":
                path = resolve("embedded").path
            elif name == "checkpoints":
                make_tokenizer(400).save_pretrained(path)
            else:
                write_checkpoint(path, OTHERS[name]() if name in OTHERS else _trained(name))
            known[name] = Tokenizer(path)
        return known[name]

    yield make
    for tokenizer in known.values():
        tokenizer.close()


OTHERS = {"byte level": byte_level, "byte fallback": byte_fallback}
ALL = ["embedded", "checkpoints", *OTHERS, *KINDS]
PIECES = [
    *SPECIAL, *(token.content for token in ADDED), "<", "|", "<|", "|>", "#", "s", " ", "\n", "\n\n", "  ", "word",
    "_", "the", " fox", "É", "é", "\u0301", "ﬁ", "＜s＞", "12", "€", "im_start", "<|im_", "name", "after",
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_ids_are_those_of_the_whole_text(made: Callable[[str], Tokenizer], name: str, data: st.DataObject) -> None:
    tokenizer = made(name)
    written = "".join(token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
    turns = TurnTokens(tokenizer, written)
    text = ""
    for _ in range(data.draw(st.integers(1, 4))):
        cut = data.draw(st.integers(0, len(text)))
        text = text[:cut] + "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SHORTEST", 0)
            found = asyncio.run(turns.encode(text, "alice", param="messages"))
        assert list(found) == tokenizer.encode_now(text, add_special_tokens=False), text


def test_a_marker_is_a_token_before_which_any_text_can_be_split(made: Callable[[str], Tokenizer]) -> None:
    found = set(markers_of(made("bytes")))
    assert found == {*SPECIAL, "<|right|>", "<tool>s"}
    assert MARKER in set(markers_of(made("embedded")))


class Counted:
    """Records the parts of texts that a tokenizer tokenizes."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        real = tokenizer.encode_now

        def counted(text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
            self.texts.append(text)
            return real(text, add_special_tokens=add_special_tokens, param=param)

        monkeypatch.setattr(tokenizer, "encode_now", counted)

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


@pytest.fixture
def counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(tokenizer, monkeypatch)


def _turn(number: int, word: str = "hello ") -> str:
    return f"{MARKER}user\n{number} {word * 100}<|im_end|>\n"


async def test_only_new_turns_are_tokenized(tokenizer: Tokenizer, counted: Counted) -> None:
    turns, conversation = TurnTokens(tokenizer, MARKER), [_turn(number) for number in range(5)]
    await turns.encode("".join(conversation), "alice", param="messages")
    assert counted.take() == conversation
    conversation.append(_turn(5))
    await turns.encode("".join(conversation), "alice", param="messages")
    assert counted.take() == [conversation[-1]], "a longer conversation"
    conversation[2] = _turn(2, "changed ")
    found = await turns.encode("".join(conversation), "alice", param="messages")
    assert counted.take() == [conversation[2]], "a turn in the middle was edited"
    assert list(found) == tokenizer.encode_now("".join(conversation), add_special_tokens=False)
    counted.take()
    await turns.encode("".join(conversation[:4]), "alice", param="messages")
    assert counted.take() == [], "the last turns were removed"
    other = [*conversation[:3], _turn(9)]
    await turns.encode("".join(other), "alice", param="messages")
    assert counted.take() == [other[-1]], "another conversation with the same beginning"
    await turns.encode("system prompt " + "".join(other), "alice", param="messages")
    assert counted.take() == ["system prompt "]


async def test_owners_share_nothing(tokenizer: Tokenizer, counted: Counted) -> None:
    turns, text = TurnTokens(tokenizer, MARKER), "".join(_turn(number) for number in range(5))
    for owner in ("alice", "bob", "alice"):
        await turns.encode(text, owner, param="messages")
    assert len(counted.take()) == 2 * 5
    before = turns.num_bytes
    await turns.encode("x" + text, None, param="messages")
    assert counted.take() == ["x" + text]
    assert turns.num_bytes == before, "without an owner nothing is stored"


async def test_what_is_kept_is_bounded(tokenizer: Tokenizer, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    one = len(tokenizer.encode_now(_turn(100), add_special_tokens=False)) * 4 + 256
    monkeypatch.setattr(module, "MAX_BYTES", 8 * one)
    turns = TurnTokens(tokenizer, MARKER)
    for number in range(100, 108):
        await turns.encode(_turn(number) * 4, "alice", param="messages")
    assert turns.num_bytes == 8 * one
    counted.take()
    await turns.encode(_turn(100) * 4, "alice", param="messages")
    await turns.encode(_turn(108) * 4, "alice", param="messages")
    assert turns.num_bytes == 8 * one
    assert counted.take() == [_turn(108)]
    await turns.encode(_turn(100) * 4, "alice", param="messages")
    assert counted.take() == [], "it was used recently"
    await turns.encode(_turn(101) * 4, "alice", param="messages")
    assert counted.take() == [_turn(101)], "it was the least recently used"


async def test_many_parts_are_tokenized_as_one(tokenizer: Tokenizer, counted: Counted) -> None:
    turns = TurnTokens(tokenizer, MARKER)
    for text in (MARKER * 2_049, "no marker " * 300, MARKER + "short"):
        await turns.encode(text, "alice", param="messages")
        assert counted.take() == [text]
    assert turns.num_bytes == 0


async def test_a_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    turns = TurnTokens(tokenizer, MARKER)
    with pytest.raises(InvalidRequestError, match=r"messages is not valid Unicode"):
        await turns.encode(_turn(0) * 5 + "\ud800", "alice", param="messages")


async def test_a_chat_tokenizes_what_is_new_to_its_owner(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(Config(model=str(checkpoint), max_model_len=100_000))
    counted, words = Counted(llm._tokenizer, monkeypatch), random.Random(3)
    messages = [{"role": "user", "content": " ".join(words.choices(["quick", "fox", "dog"], k=300))} for _ in range(6)]
    try:
        for number, owner in ((4, "alice"), (5, "alice"), (5, "bob")):
            request = ChatRequest(messages=messages[:number], owner=owner)
            prompt = await llm.prepare_chat(request, SamplingParams())
            new = "".join(counted.take())
            text = await llm._chat.render(request)
            assert list(prompt.token_ids) == llm._tokenizer.encode_now(text, add_special_tokens=False)
            counted.take()
            if (number, owner) == (5, "alice"):
                assert messages[4]["content"] in new
                assert messages[3]["content"] not in new
            else:
                assert all(message["content"] in new for message in messages[:number])
    finally:
        await llm.stop()
