"""A search over a file of texts as an MCP server: `python -m podrl.environments.search_server [--corpus=FILE.jsonl]`.

Its tool `snippet_search` ranks texts by BM25 and answers in the form of Semantic Scholar, as DR-Tulu's server does. The
default corpus is the made-up facts of the embedded task 'facts' (podrl/data/facts.py).
"""

import collections
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import flags

from podrl.environments import tool_server

FACTS = pathlib.Path(__file__).resolve().parent.parent / "assets" / "facts.jsonl"
LONGEST, MOST = 1000, 100  # largest number of characters of a query, and of texts in an answer
_K1, _B = 1.2, 0.75  # weights of BM25 (Robertson and Zaragoza 2009): how repeated words and long texts count
_WORD = re.compile(r"\w+")


class Document(NamedTuple):
    """A text that can be found, with its title."""

    title: str
    text: str


def read(path: pathlib.Path) -> list[Document]:
    """Reads a corpus: JSON lines with the texts 'title' and 'text'; the title may be missing.

    Raises:
      ValueError: a line does not have this form (the message names the line), or the file has no lines.
    """
    found = []
    # The file is split as bytes, because str.splitlines also cuts at characters such as U+2028 inside a text.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            title, text = record.get("title", ""), record["text"]
            if not isinstance(title, str) or not isinstance(text, str):
                raise TypeError("'title' and 'text' must be texts")
            found.append(Document(title, text))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"--corpus={path}, line {number}, is not a text for the corpus ({type(error).__name__}: {error}): "
                'write {"title": "...", "text": "..."} in each line.'
            ) from None
    if not found:
        raise ValueError(f"--corpus={path} is empty: write a text in each line.")
    return found


class Index:
    """An index of documents by their words.

    Attributes:
      documents: the documents.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        words = [collections.Counter(_words(f"{one.title} {one.text}")) for one in documents]
        lengths = [count.total() for count in words]
        mean = sum(lengths) / len(lengths)
        self._places: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
        for place, (count, length) in enumerate(zip(words, lengths, strict=True)):
            for word, times in count.items():
                weight = times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * length / mean))
                self._places[word].append((place, weight))

    def best(self, query: str, limit: int) -> list[tuple[float, Document]]:
        """Finds the documents with the largest BM25 scores, best first; documents with equal scores keep their order.

        Args:
          query: words to find.
          limit: largest number of documents to return. A document without any of the words is not returned.
        """
        scores: collections.defaultdict[int, float] = collections.defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            found = self._places.get(word, ())
            rarity = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] += rarity * weight
        ranked = sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:limit]
        return [(score, self.documents[place]) for place, score in ranked]


def searcher(path: pathlib.Path) -> Callable[..., str]:
    """Makes the tool `snippet_search` over a corpus."""
    index = Index(read(path))

    # The model reads this docstring as the description of the tool, so a change of it changes prompts.
    def snippet_search(query: str, limit: int = 10) -> str:
        """Finds the texts that have the words of a query, the best first."""
        if len(query) > LONGEST:
            raise ValueError(f"{len(query)} characters, at most {LONGEST}")
        if not 1 <= limit <= MOST:
            raise ValueError(f"limit={limit}, from 1 to {MOST}")
        found = [
            {"paper": {"title": one.title}, "snippet": {"text": one.text}, "score": round(score, 4)}
            for score, one in index.best(query, limit)
        ]
        return json.dumps({"data": found})

    return snippet_search


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


if __name__ == "__main__":
    _CORPUS = flags.DEFINE_string("corpus", str(FACTS), "JSON lines with 'title' and 'text'.")
    tool_server.start(lambda: searcher(pathlib.Path(_CORPUS.value)))
