"""The byte-level BPE tokenizer: trained on generated conversations, with a space-led twin of every token."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import conversation
import words
from skills import SINGLE
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB_SIZE = 6144
SPACE = "Ġ"  # how byte-level BPE writes a space
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BARE_PIECES = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+| |\s+"


def training_text(seed: int, count: int) -> Iterator[str]:
    """Conversations of all skills, invented words, and common English words."""
    rng = random.Random(seed)
    weights = dict.fromkeys((*SINGLE, "tell", "ask", "tell and ask"), 1.0)
    for _ in range(count):
        talk = conversation.begin(rng, "train", 0.25)
        for _ in range(6):
            talk.turns += conversation.next_turns(rng, "train", talk, weights)
        yield conversation.system_segment(talk)[0]
        yield from (text for turn in talk.turns for text, _ in conversation.turn_segments(*turn))
        yield " ".join(words.invented(rng, "train") for _ in range(20))
        yield " ".join(
            rng.choice((str.lower, str.capitalize, str))(rng.choice(words.WORDS["common"])) for _ in range(60)
        )
        yield " ".join(words.pick(rng, words.WORDS["names"] + words.WORDS["cities"], "train") for _ in range(10))


def learn_merges(seed: int, count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The bytes and the merges learned from text in which no token holds a leading space."""
    twins = sum(len(token) == 1 and token.isascii() for token in pre_tokenizers.ByteLevel.alphabet())
    merges = (VOCAB_SIZE - len(SPECIAL) - len(ADDED) - 256 - twins) // 2
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BARE_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=SPECIAL + ADDED, max_token_length=16,
    )  # fmt: skip
    trainer.vocab_size += len(SPECIAL) + len(ADDED)
    bpe.train_from_iterator(training_text(seed, count), trainer)
    learned = json.loads(bpe.to_str())["model"]["merges"]
    return sorted(pre_tokenizers.ByteLevel.alphabet()), [(left, right) for left, right in learned]


def with_twins(alphabet: list[str], merges: list[tuple[str, str]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges with a space-led twin of every token behind them.

    The twins' merges rank last, so " word" is cut exactly as "word" is and only its first token changes into its twin.
    """
    plain = alphabet + [left + right for left, right in merges]
    led = [token for token in plain if token[0] not in "ĠĊĉč" and (len(token) > 1 or token.isascii())]
    tokens = SPECIAL + ADDED + plain + [SPACE + token for token in led]
    return {token: i for i, token in enumerate(tokens)}, merges + [(SPACE, token) for token in led]


def build(directory: Path, seed: int = 1, count: int = 6000) -> None:
    """Train the tokenizer and write it, with the chat template, to `directory`."""
    vocab, merges = with_twins(*learn_merges(seed, count))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192,
        clean_up_tokenization_spaces=False, additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    fast.save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release of transformers knows
    config.pop("backend", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def twins(tokenizer: Tokenizer) -> list[int]:
    """For each token id, the id of the same token without its leading space, or its own."""
    vocab = tokenizer.get_vocab()
    names = sorted(vocab, key=lambda token: vocab[token])
    return [
        vocab[token[1:]] if len(token) > 1 and token[0] == SPACE and token[1:] in vocab else vocab[token]
        for token in names
    ]
