"""A client for any OpenAI-compatible server, for commands: its address, its models, streams of its events."""

from __future__ import annotations

from raylm.client.answers import Answer as Answer
from raylm.client.answers import ask as ask
from raylm.client.connection import Connection as Connection
from raylm.client.connection import ServerError as ServerError
from raylm.client.connection import clean as clean
from raylm.client.connection import events as events
from raylm.client.connection import is_address as is_address
from raylm.client.deltas import Delta as Delta
from raylm.client.deltas import delta_of as delta_of
