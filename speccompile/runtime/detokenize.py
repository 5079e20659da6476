"""Token ids to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable

TokenBytes = Callable[[int], bytes]
"""Bytes a token stands for; empty for special tokens."""


class Detokenizer:
    """Incremental UTF-8 decoder over token bytes.

    Bytes of an unfinished character are held back until it is complete, and dropped when the
    generation ends before that.  Bytes that cannot be part of any character become U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token."""
        return self._decoder.decode(self._token_bytes(token_id))
