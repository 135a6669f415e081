"""Text from tokens, as they come: never a broken character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

_BROKEN = "\ufffd"
# A character of UTF-8 spans at most four byte tokens; past that, the bytes are not the start of one.
_LONGEST_CHARACTER = 4


class TextStream:
    """Incremental detokenisation with stop strings.

    Args:
        decode: ids to text.
        stop: strings that end the text; they and what follows are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded again for each piece: a piece depends on its neighbours
        self._given = 0  # characters of that decoding that are in the text or held
        self._whole = 0  # ids before this end with a whole character
        self._open = 0  # tokens after those, the ones without text not counted
        self._held = ""  # text that may be the beginning of a stop string
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain. After a stop string was met, returns ""."""
        self._ids.append(token)
        return self._release(self._new_text())

    def finish(self) -> str:
        """Return the text that was still held back. Bytes that never became a character are dropped."""
        if self.stopped:
            return ""
        piece, self._held = self._held, ""
        self.text += piece
        return piece

    def _new_text(self) -> str:
        now = self._decode(self._ids[self._context :])
        if now.endswith(_BROKEN):
            self._open += self._decode(self._ids[-1:]) != ""
            # Of more bytes than a character has only the last can still begin one.
            now = now.rstrip(_BROKEN) if self._open < _LONGEST_CHARACTER else now[:-1]
            piece = now[self._given :]
            self._given = max(self._given, len(now))
            return piece
        piece = now[self._given :]
        if piece:
            self._context, self._given = self._whole, len(self._decode(self._ids[self._whole :]))
        self._whole, self._open = len(self._ids), 0
        return piece

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            out = text[: min(found)]
        else:
            keep = max((_overlap(text, s) for s in self._stop), default=0)
            out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
