"""Places to store responses, for tests of all stores: a file, or a schema in a Postgres server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raylm.ingress.responses.database import Database, FileDatabase
from raylm.ingress.responses.postgres import PostgresDatabase
from tests.postgres import Postgres, lacking


@dataclass(frozen=True)
class Place:
    """The value of ``ingress.store``, and the name of the application."""

    knob: str
    application: str

    def open(self, clock: Callable[[], float] | None = None) -> Database:
        """A new connection. By default it uses the clock of the place."""
        if self.knob.startswith("postgresql"):
            return PostgresDatabase(self.knob, self.application, clock)
        return FileDatabase(self.knob, clock or time.time)

    def another(self) -> Place:
        """An empty place of the same kind."""
        knob = self.knob if self.knob.startswith("postgresql") else f"{self.knob}.{uuid.uuid4().hex}"
        return Place(knob, uuid.uuid4().hex)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(str(tmp_path / "store.sqlite"), "")
    server: Postgres = request.getfixturevalue("postgres")
    return Place(server.url, uuid.uuid4().hex)
