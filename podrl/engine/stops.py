"""Finds stop strings in the text of tokens as they arrive."""

from collections.abc import Callable, Sequence

_PARTIAL = "\ufffd"  # the character that decoders write for bytes that are not (yet) a character
# Number of characters at the ends of the tail's text that may differ from the whole text, because a character is cut or
# a space is stripped.
_EDGE = 8


class StopFinder:
    """Looks for stop strings in a sample's completion; decodes only the completion's last tokens (the tail).

    A stop string may begin and end inside tokens, and a character may take several tokens. So the tail's smallest
    length is counted in characters, not in tokens. Appended tokens, such as a tool's output, are not searched.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]):
        self._strings, self._decode = tuple(strings), decode
        self._needed = max(len(s) for s in strings) + _EDGE  # smallest number of characters of the tail
        self._first = 0  # index of the tail's first token
        self._limit = 2 * self._needed  # number of tokens from which on the tail is shortened
        self._seen = 0  # number of tokens searched so far

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the smallest number of tokens whose text contains a stop string; None if there is none.

        Args:
          tokens: all tokens of the completion so far.
        """
        start, self._seen = self._seen, len(tokens)
        text = self._text(tokens[self._first :])
        # While the last character of a run of bytes is incomplete, some decoders write `_PARTIAL` for the whole run. A
        # stop string in the run is then visible only in the text of fewer tokens.
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
        """Drops the first half of a long tail, if the rest begins with a whole character and is long enough."""
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
