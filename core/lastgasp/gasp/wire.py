"""The framing of messages on the control connection: length, encodable text, and proof of the token."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from lastgasp.errors import ProtocolError

HEADER = 4
"""Bytes of the length in front of a frame."""
Role = Literal["rank", "controller", "operator", "keeper", "sender", "receiver"]
"""sender, receiver: launchers of two hosts, of which one keeps copies of the other one's arenas."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Base of all messages."""


def one_line(error: BaseException) -> str:
    """Describe an error in text that every message and record can carry (file names may hold lone surrogates)."""
    return encodable(f"{type(error).__name__}: {error}")


def encodable(text: str) -> str:
    """The same text; characters that UTF-8 cannot encode are escaped."""
    return text.encode(errors="backslashreplace").decode()


def body_size(header: bytes, limit: int) -> int:
    """The length that a header announces.

    Raises:
        ProtocolError: longer than `limit`.
    """
    size = int.from_bytes(header, "big")
    if size > limit:
        raise ProtocolError(f"a frame of {size} bytes was announced; at most {limit} are allowed here")
    return size


def proof(token: str, role: Role, nonce: bytes, rank: int) -> bytes:
    """HMAC-SHA256 over role, rank and the other side's nonce; the token itself never travels."""
    return hmac.new(token.encode(), f"{role}:{rank}:".encode() + nonce, hashlib.sha256).digest()


def proven(token: str, role: Role, nonce: bytes, rank: int, mac: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof(token, role, nonce, rank), mac)
