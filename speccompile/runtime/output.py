"""The kept output of one request: ids, text and the reason why it ended.

Rounds deliver several tokens at once; they are kept one by one, and each is checked for stop ids,
then stop strings, then the token limit, so that a stop inside the limit is never missed and nothing
after the end is ever kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from speccompile.runtime.detokenize import Detokenizer, TokenBytes
from speccompile.runtime.stops import StopStrings

FinishReason = Literal["stop", "length", "cancelled"]


class Output:
    """Grows by :meth:`push` until ``finish_reason`` is set.

    A token that ends the output (EOS, a stop id, or the one that completes a stop string) is kept in
    ``token_ids``; the text of EOS and stop ids, and a stop string, are not part of ``text``.
    """

    def __init__(
        self, *, stop_ids: Collection[int], stops: Sequence[str], max_tokens: int, token_bytes: TokenBytes
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None if max_tokens > 0 else "length"
        self._stop_ids = frozenset(stop_ids)
        self._stops = StopStrings(stops)
        self._max_tokens = max_tokens
        self._detokenizer = Detokenizer(token_bytes)
        self._pieces: list[str] = []
        self._num_streamed = 0

    def push(self, token_id: int) -> None:
        """Keep one more token."""
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            self.finish("stop")
            return
        shown, stopped = self._stops.push(self._detokenizer.push(token_id))
        self._pieces.append(shown)
        if stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End here; text held back for a stop string that never came is shown."""
        self._pieces.append(self._stops.flush())
        self.finish_reason = reason

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take_text(self) -> str:
        """Text that became known since the last call; all takes together are ``text``."""
        new = "".join(self._pieces[self._num_streamed :])
        self._num_streamed = len(self._pieces)
        return new
