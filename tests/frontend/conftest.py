"""Fixtures of the front end: checkpoints, tokenizers, and an AsyncLLM whose engines the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.frontend.text.tokenizer import Tokenizer
from tests.frontend.checkpoints import byte_fallback, byte_level, write_checkpoint
from tests.frontend.played_engine import PlayedEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("byte_level"), byte_level())


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_checkpoint(tmp_path_factory.mktemp("byte_fallback"), byte_fallback()))


@pytest.fixture
async def llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM without an engine."""
    llm = AsyncLLM(Config(model=str(checkpoint), served_model_name="played"))
    yield llm
    await llm.stop()


@pytest.fixture
async def engine(llm: AsyncLLM) -> PlayedEngine:
    """The first engine of ``llm``."""
    engine = PlayedEngine("e1")
    llm.add_engine(engine)
    return engine
