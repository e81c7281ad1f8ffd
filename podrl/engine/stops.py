"""Finds stop strings in the text of tokens as they arrive."""

from collections.abc import Callable, Sequence

_PARTIAL = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_EDGE = 8  # characters at the ends of a window that may change: cut-off characters, a stripped space


class StopFinder:
    """Looks for any of several texts in one sample's completion, decoding only its tail.

    A stop string may begin and end inside tokens, and a character may take several tokens, so the tail that is decoded
    is bounded by its text, not by its tokens. Given tokens (tool output) are not searched.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]):
        self._strings, self._decode = tuple(strings), decode
        self._needed = max(len(s) for s in strings) + _EDGE  # characters the tail must hold
        self._first = 0  # token the tail begins with
        self._limit = 2 * self._needed  # tokens of the tail from which on it is worth shortening
        self._seen = 0  # tokens searched

    def find(self, tokens: Sequence[int]) -> int | None:
        """Finds the smallest number of tokens whose text contains a stop string, if `tokens` contain one."""
        start, self._seen = self._seen, len(tokens)
        text = self._text(tokens[self._first :])
        # Some decoders write a whole run of bytes as partial while its end is: only the tokens before show its text.
        if self._contains(text) or _PARTIAL in text:
            for end in range(start + 1, len(tokens) + 1):
                if self._contains(self._text(tokens[self._first : end])):
                    self._seen = end
                    return end
        self._shorten(tokens)
        return None

    def restart(self, length: int) -> None:
        """Restarts the search after the first `length` tokens."""
        self._first = self._seen = length

    def cut(self, text: str) -> str:
        """Cuts `text` after the stop string that ends last in it."""
        ends = [text.rfind(s) + len(s) for s in self._strings if s in text]
        return text[: max(ends)] if ends else text

    def _shorten(self, tokens: Sequence[int]) -> None:
        """Drops the first half of a long tail, if the rest begins with a character and holds enough of them."""
        length = len(tokens) - self._first
        if length < self._limit:
            return
        whole = len(tokens)
        cuts = range(4)  # a character has at most four bytes
        end = next(
            (whole - n for n in cuts if not self._text(tokens[self._first : whole - n]).endswith(_PARTIAL)), whole
        )
        for first in (self._first + length // 2 - n for n in cuts):
            text = self._text(tokens[first:end])
            if len(text.rstrip(_PARTIAL)) >= self._needed and not text.startswith(_PARTIAL):
                self._first = first
                return
        self._limit = 2 * length

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(list(tokens))

    def _contains(self, text: str) -> bool:
        return any(s in text for s in self._strings)
