"""Seal: reasoning as a text that its client keeps and cannot read or change, for conversations that are not stored."""

from __future__ import annotations

import base64
import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE = 12  # bytes


class Seal:
    """AES-256 in GCM; all that have the same ``secret`` open what one of them closed, without it nobody else."""

    def __init__(self, secret: bytes | None = None) -> None:
        key = hashlib.blake2b(digest_size=32, key=secret or os.urandom(32), person=b"reasoning").digest()
        self._cipher = AESGCM(key)

    def close(self, text: str, owner: str) -> str:
        """``text`` sealed for the requests of the key whose name is ``owner``; base64 of nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, text.encode(), owner.encode())).decode()

    def open(self, sealed: str, owner: str) -> str | None:
        """The text, None if it was not sealed with this secret for this owner, or was changed."""
        try:
            raw = base64.b64decode(sealed, validate=True)
            return self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], owner.encode()).decode()
        except (ValueError, InvalidTag):
            return None
