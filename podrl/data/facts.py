"""The embedded task 'facts': a corpus about made-up towns, questions that need a search, and answers to learn.

A document tells two facts of a building in a town; a question asks for one of the two, and its answer is a number. The
key of a question is its building, its town and the fact. A model cannot know the answers of held-out questions: it has
to search the corpus, podrl/assets/facts.jsonl, which `python -m podrl.data.facts --out=FILE` writes. The search server
is podrl/environments/search_server.py.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

from absl import app, flags

from podrl.data import template
from podrl.data.problem_generator import ProblemGenerator, RandomDraws
from podrl.data.template import TextPart

# The name of a town is one of the beginnings followed by one of the ends.
BEGINNINGS = (
    *("Bel", "Dor", "Fen", "Gal", "Hol", "Ist", "Kar", "Lem", "Mar", "Nor", "Ost", "Pel"),
    *("Quin", "Ros", "Sel", "Tor", "Ulm", "Ver", "Wal", "Yor", "Zan", "Bri", "Cas", "Dun"),
)
ENDS = (
    *("mora", "vik", "stead", "gard", "holm", "ria", "ton", "dale", "berg", "wick", "ford", "mouth"),
    *("ley", "haven", "crest", "mere", "stone", "burn", "field", "port", "tova", "nesse", "lund", "sko"),
)
# The fact besides the year, by kind of building: its text, its questions, and the smallest and largest value.
BUILDINGS: Mapping[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {
    "bridge": ("is {n} feet long", ("How long is the {of}?", "How many feet long is the {of}?"), (40, 990)),
    "tower": ("is {n} feet high", ("How high is the {of}?", "How many feet high is the {of}?"), (40, 490)),
    "library": ("has {n} books", ("How many books does the {of} have?",), (300, 9900)),
    "market": ("has {n} stalls", ("How many stalls does the {of} have?",), (11, 240)),
    "inn": ("has {n} rooms", ("How many rooms does the {of} have?",), (11, 99)),
    "school": ("has {n} seats", ("How many seats does the {of} have?",), (20, 980)),
}
BUILT = ("When was the {of} built?", "In which year was the {of} built?")
_YEARS = (1100, 1990)
PER_TOWN = 3  # number of buildings in each town
_SEED = 7


@dataclasses.dataclass(frozen=True)
class Document:
    """A text of the corpus.

    Attributes:
      town: name of the town, which is the text's title.
      building: kind of the building.
      year: year in which the building was built.
      number: value of the building's other fact.
    """

    town: str
    building: str
    year: int
    number: int

    @property
    def text(self) -> str:
        """Both facts in one sentence."""
        other = _other(self.building, str(self.number))
        return f"The {self.building} of {self.town} was built in {self.year} and {other}."

    @property
    def shown(self) -> str:
        """The document as a model reads it, with its title."""
        return f"Title: {self.town}\nSnippet: {self.text}"


@functools.cache
def documents() -> Sequence[Document]:
    """Returns the corpus, the same on every machine."""
    draw, found = RandomDraws(_SEED), []
    for town in (beginning + end for beginning in BEGINNINGS for end in ENDS):
        left = list(BUILDINGS)
        for _ in range(PER_TOWN):
            building = left.pop(draw.between(0, len(left) - 1))
            found.append(Document(town, building, draw.between(*_YEARS), draw.between(*BUILDINGS[building][2])))
    return found


@dataclasses.dataclass(frozen=True)
class Fact:
    """A question with the document that answers it.

    Attributes:
      question: the question, in English.
      answer: answer in decimal digits.
      about: the fact that the question asks for, 'built' or 'other'.
      place: position of the document in the corpus.
    """

    question: str
    answer: str
    about: str
    place: int

    @property
    def document(self) -> Document:
        """The document that answers the question."""
        return documents()[self.place]

    @property
    def key(self) -> str:
        """The identity of the question, without its wording."""
        return f"{self.document.building}/{self.document.town}/{self.about}"

    @property
    def fields(self) -> Mapping[str, str]:
        """The question as a record of the task."""
        return {"question": self.question, "answer": self.answer, "document": self.document.text}

    @property
    def statement(self) -> str:
        """The answer in the words of the document, such as 'built in 1473'."""
        return f"built in {self.answer}" if self.about == "built" else _other(self.document.building, self.answer)

    def cited(self, draw: RandomDraws) -> list[TextPart]:
        """Writes an answer that uses a search: the call, its output (which is not learned), and the cited statement."""
        key = _key(draw)
        return [*self._search(key), self._answered(f"{key}-0")]

    def half_known(self, draw: RandomDraws) -> list[TextPart]:
        """Writes a poor answer: usually a guess; else a search and the right answer, with a wrong citation or none."""
        kind = draw.between(0, 9)
        if kind < 7:
            first, *rest = self.answer
            return [template.answered(first + "".join(str(draw.between(0, 9)) for _ in rest))]
        return [*self._search(_key(draw)), self._answered(f"{_key(draw)}-0" if kind == 7 else "")]

    def _search(self, key: str) -> list[TextPart]:
        """Writes the call, and its output of one document."""
        call = f"{template.SEARCH_START}{self.document.building} of {self.document.town}{template.CALL_END}"
        return [TextPart(call, learned=True), TextPart(search_output(key, [self.document]))]

    def _answered(self, cited: str) -> TextPart:
        mark = f'{template.CITE_START}{cited}">{self.statement}{template.CITE_END}'
        return template.answered(mark if cited else self.statement)


def _other(building: str, number: str) -> str:
    return BUILDINGS[building][0].format(n=number)


def search_output(key: str, found: Sequence[Document]) -> str:
    """Writes the output of a search, character for character as podrl.environments does.

    Args:
      key: eight hexadecimal digits, the same for all documents of a call.
      found: documents that the search returned.
    """
    snippets = "\n".join(
        f"{template.SNIPPET_START}{key}-{number}>\n{one.shown}\n{template.SNIPPET_END}"
        for number, one in enumerate(found)
    )
    return f"\n{template.OUTPUT_START}{snippets}{template.OUTPUT_END}\n\n"


def _key(draw: RandomDraws) -> str:
    """Draws the eight hexadecimal digits that stand for a call."""
    return f"{draw.between(0, 2**32 - 1):08x}"


def _write(draw: RandomDraws) -> Fact:
    place = draw.between(0, len(documents()) - 1)
    document = documents()[place]
    about, wordings, answer = draw.one(
        (("built", BUILT, document.year), ("other", BUILDINGS[document.building][1], document.number))
    )
    question = draw.one(wordings).format(of=f"{document.building} of {document.town}")
    return Fact(question, str(answer), about, place)


GENERATOR = ProblemGenerator(_write, reasoned=False)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments {argv[1:]}: the flag is --out=FILE.")
    lines = [json.dumps({"title": one.town, "text": one.text}) + "\n" for one in documents()]
    pathlib.Path(_OUT.value).write_text("".join(lines))


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", None, "File to write the corpus to.", required=True)
    app.run(main)
