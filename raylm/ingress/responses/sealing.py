"""Seal: encrypts reasoning, so that a client can keep it for a conversation that is not stored."""

from __future__ import annotations

import base64
import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE = 12  # bytes


class Seal:
    """AES-256-GCM. Replicas with the same ``secret`` can open each other's seals."""

    def __init__(self, secret: bytes | None = None) -> None:
        key = hashlib.blake2b(digest_size=32, key=secret or os.urandom(32), person=b"reasoning").digest()
        self._cipher = AESGCM(key)

    def close(self, text: str, owner: str) -> str:
        """Encrypt ``text`` for requests of the key named ``owner``. Returns base64 of nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, text.encode(), owner.encode())).decode()

    def open(self, sealed: str, owner: str) -> str | None:
        """Decrypt ``sealed``. None if it was changed, or sealed with another secret or for another owner."""
        try:
            raw = base64.b64decode(sealed, validate=True)
            return self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], owner.encode()).decode()
        except (ValueError, InvalidTag):
            return None
