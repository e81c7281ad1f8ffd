"""Finds stop strings in the text of tokens as they arrive."""

from collections.abc import Callable, Sequence


class StopFinder:
    """Looks for any of several texts in one sample's completion, decoding only its tail.

    A stop string may begin and end inside tokens. Given tokens (tool output) are not searched.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]):
        self._strings, self._decode = tuple(strings), decode
        self._overlap = max(len(s) for s in strings) + 8  # a token is a character or more, but for bytes of one
        self._from = 0  # first token that may be part of a match
        self._seen = 0  # tokens searched

    def find(self, tokens: Sequence[int]) -> int | None:
        """The smallest number of tokens whose text contains a stop string, if `tokens` contain one."""
        first = max(self._from, self._seen - self._overlap)
        start, self._seen = self._seen, len(tokens)
        if not self._contains(tokens[first:]):
            return None
        for end in range(start + 1, len(tokens)):
            if self._contains(tokens[first:end]):
                self._seen = end
                return end
        return len(tokens)

    def restart(self, length: int) -> None:
        """Searches only what follows the first `length` tokens."""
        self._from = self._seen = length

    def cut(self, text: str) -> str:
        """`text` up to the end of the stop string that ends last in it, which is kept."""
        ends = [text.rfind(s) + len(s) for s in self._strings if s in text]
        return text[: max(ends)] if ends else text

    def _contains(self, tokens: Sequence[int]) -> bool:
        text = self._decode(list(tokens))
        return any(s in text for s in self._strings)
