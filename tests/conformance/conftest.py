"""The embedded model behind HTTP, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedded_server import EmbeddedServer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedServer() as url:
        yield url
