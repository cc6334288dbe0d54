"""Builds a tokenizer.json from the vocabulary in a GGUF file.

A file names how its text is split (``tokenizer.ggml.pre``). A name that is not known here is an error: another split
would give other tokens, and worse answers, without a sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from raylm.errors import ConfigError
from raylm.gguf.reader import FileMetadata

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _BYTE = 1, 2, 3, 4, 6  # types of tokens
_SPACE = "▁"
# Tokens that end a turn. Several converters write only the token that ends a text into the file.
_ENDS = ("<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary splits text before merging. Without a ``pattern`` it is GPT-2's split.

    ``single_digits`` splits digits first. ``whole`` takes a piece that is a token as it is, without merges.
    ``composes`` normalizes texts to NFC. ``begins``: a text begins with bos if the file does not say whether.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole: bool = False
    composes: bool = False
    begins: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_OTHER_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LLAMA3 = Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_END}", whole=True, begins=True)
_QWEN2 = Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_OTHER}|{_END}", composes=True)
_TEKKEN = Split(rf"{_CASED}|\p{{N}}|{_OTHER_SLASH}|{_END}", whole=True, begins=True)
_DIGITS = Split(single_digits=True)
SPLITS = {
    "gpt-2": Split(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": replace(_QWEN2, begins=True),
    "tekken": _TEKKEN,
}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, in the order of their ids."""

    metadata: FileMetadata
    tokens: list[str]
    types: list[int]

    def of(self, kind: int) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == kind]

    def token(self, name: str) -> str | None:
        """The token whose id the file gives as ``tokenizer.ggml.<name>_token_id``."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return None
        number = self.metadata.integer(key)
        if not 0 <= number < len(self.tokens):
            raise ConfigError(f"model: {key} of {self.metadata.file} is {number}; there are {len(self.tokens)} tokens.")
        return self.tokens[number]


def tokenizer_files(metadata: FileMetadata) -> dict[str, Any]:
    """The contents of tokenizer.json, as text, and of tokenizer_config.json and generation_config.json.

    Raises:
        ConfigError: the vocabulary is damaged, or of a kind that is not served.
    """
    kind = metadata.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata)
    build = _KINDS.get(kind)
    if build is None:
        what = f"the tokenizer {kind[:40]!r} of {metadata.file} is not served"
        raise ConfigError(f"model: {what}; served: {', '.join(_KINDS)} (byte-level BPE, and SentencePiece's BPE).")
    try:
        tokenizer, begins = build(vocabulary)
        _add_special(tokenizer, vocabulary)
        _add_ends(tokenizer, vocabulary, begins)
        text = tokenizer.to_str()
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"model: the vocabulary of {metadata.file} is damaged: {error}.") from error
    special = {f"{name}_token": vocabulary.token(name) for name in ("bos", "eos")}
    special |= {"unk_token": vocabulary.token("unknown"), "pad_token": vocabulary.token("padding")}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in special.items() if token is not None}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": _stop_ids(vocabulary)},
    }


def _vocabulary(metadata: FileMetadata) -> _Vocabulary:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    key = "tokenizer.ggml.token_type"
    types = metadata.integers(key) if key in metadata else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"model: {metadata.file} has {len(tokens)} tokens, and types of {len(types)}.")
    return _Vocabulary(metadata, tokens, types)


def _stop_ids(vocabulary: _Vocabulary) -> list[int]:
    """The tokens that end an answer."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    control = set(vocabulary.of(_CONTROL)) | set(vocabulary.of(_OWN))
    named = (vocabulary.token(name) for name in ("eos", "eot", "eom"))
    ends = [*(token for token in named if token is not None), *(token for token in _ENDS if token in control)]
    return [ids[token] for token in dict.fromkeys(ends)]


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, as GPT-2's."""
    metadata = vocabulary.metadata
    name = metadata.text("tokenizer.ggml.pre", "")
    split = SPLITS.get(name)
    if split is None:
        what = (
            f"tokenizer.ggml.pre of {metadata.file} is {name[:40]!r}"
            if name
            else f"{metadata.file} has no tokenizer.ggml.pre"
        )
        raise ConfigError(
            f"model: {what}; served: {', '.join(SPLITS)}. Another split of texts would give other tokens."
        )
    pairs = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    if not all(len(pair) == 2 for pair in pairs):
        raise ConfigError(f"model: tokenizer.ggml.merges of {metadata.file} must be pairs of tokens.")
    merges = [(left, right) for left, right in pairs]
    vocab = {token: number for number, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE. Its file has scores in place of merges; bytes that no token has are tokens like <0x0A>."""
    metadata = vocabulary.metadata
    vocab = {token: number for number, token in enumerate(vocabulary.tokens)}
    unknown = next(iter(vocabulary.of(_UNKNOWN)), None)
    merges = _merges(vocabulary, vocab)
    falls_back = bool(vocabulary.of(_BYTE))
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls_back)
    tokenizer = Tokenizer(model)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer, True


def _merges(vocabulary: _Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that form a token, those of a higher score first."""
    scores = vocabulary.metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        what = f"{len(vocabulary.tokens)} tokens, and scores of {len(scores)}"
        raise ConfigError(f"model: {vocabulary.metadata.file} has {what}.")
    merges = []
    for token, number in vocab.items():
        if vocabulary.types[number] != _NORMAL:
            continue
        for left, right in ((token[:at], token[at:]) for at in range(1, len(token))):
            if left in vocab and right in vocab:
                merges.append((-scores[number], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens, such as <|im_start|>, as special tokens, and tokens of the user as text that stays whole."""
    tokens = [AddedToken(token, normalized=False, special=True) for token in vocabulary.of(_CONTROL)]
    tokenizer.add_special_tokens(tokens)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of(_OWN)])


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, begins: bool) -> None:
    """Texts begin with the bos token, or end with the eos token, where the file says so."""
    metadata = vocabulary.metadata
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    first = bos if metadata.flag("tokenizer.ggml.add_bos_token", begins) else None
    last = eos if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (first, last) if token is not None]
    if around:
        ids = [(token, vocabulary.tokens.index(token)) for token in dict.fromkeys(around)]
        before, after = ([first] if first else []), ([last] if last else [])
        second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        single = [*before, "$A", *after]
        tokenizer.post_processor = processors.TemplateProcessing(single, [*single, *second], ids)


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
