"""Reads the number that an answer gives: signs, separators, fractions, percent, powers of ten, currency, units after.

Every reward and every evaluation that compares numbers reads them here. A number keeps its exact value, as a fraction.
An answer that could be several numbers, or is a calculation ("7 or 8", "11, 12", "10 - 2"), gives none.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple


class Number(NamedTuple):
    """A number as it was written, `top` / `bottom` in lowest terms, without its percent sign: 12 / 1 for '12%'.

    `fractions.Fraction` would import the module `numbers`, a name that a user's script may have.

    Attributes:
      top: numerator.
      bottom: denominator, above 0.
      percent: True where a sign or word for percent follows the number.
    """

    top: int
    bottom: int
    percent: bool = False

    def equals(self, other: "Number") -> bool:
        """True if both are the same number; units and currencies are not compared.

        '50%' equals 0.5, and 50 too, because records give shares in either way. It does not equal '0.5%'.
        """
        return any(mine == theirs for mine, theirs in self._ratios(other))

    def close(self, other: "Number", low: int, high: int) -> bool:
        """True if this number is from `low` to `high` percent of `other`; of 0, only 0 is."""
        return any(
            low * abs(theirs) <= 100 * (mine if theirs > 0 else -mine) <= high * abs(theirs) if theirs else mine == 0
            for mine, theirs in self._ratios(other)
        )

    def _ratios(self, other: "Number") -> Iterator[tuple[int, int]]:
        """Pairs of whole numbers in the ratio of both, for each way to understand percent."""
        mine, theirs = self.top * other.bottom, other.top * self.bottom
        yield mine, theirs
        if self.percent != other.percent:
            yield mine * (1 if self.percent else 100), theirs * (100 if self.percent else 1)

    def __str__(self) -> str:
        """'12', or '1/2'."""
        return f"{self.top}/{self.bottom}".removesuffix("/1")


def read(text: str) -> Number | None:
    """Reads the one number that a text gives; None where it gives none, or several that differ.

    Of an equation, the last side with a number counts. The other sides must equal it, unless they are calculations or
    say in words what is counted. docs/rewards.md lists the forms. Takes time linear in the length of the text.
    """
    plain = _plain(text)
    if _UNREADABLE.search(plain):
        return None
    try:
        sides = [side for part in plain.split("=") if (side := _Side(part)).numbers]
    except _MalformedError:
        return None
    if not sides:
        return None
    *others, last = sides
    number = last.numbers[0]
    if last.calculates or any(other != number for other in last.numbers):
        return None
    clear = all(side.calculates or side.explains or side.numbers[0].equals(number) for side in others)
    return number if clear else None


# What cannot be part of a plain number: roots, names of constants, inequalities, and LaTeX that was not rewritten.
_UNREADABLE = re.compile(r"[\0\\]|!=|[<>]|\*\*")
_CURRENCY = r"(?:USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|CHF|Rs)"
_IN_BRACES = r"\{ ?([^{}]{1,200})\}"
_OTHER_FORMS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"\uff0b": "+", "\u2044": "/", "\u2215": "/", "\uff0f": "/", "\u00f7": "/", "\uff0e": ".", "\uff0c": ","}
    | {"\uff05": "%", "\u066a": "%", "\u2019": "'", "\u02bc": "'", "\u2248": "=", "\uff1d": "="}
    | dict.fromkeys("\u00d7\u22c5\u00b7\u2217", "*")
    | dict.fromkeys("\u2260\u2264\u2265\u00b1\u221a\u03c0\u221e", "\0")
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# What is written differently in LaTeX, HTML and Markdown; every pattern is tried at bounded cost at each place.
_REWRITTEN = [
    (re.compile(r"\s+|\\(?:left|right|q?quad)(?![A-Za-z])|\\[ ()\[\]]"), " "),
    (re.compile(r"\\[,!;:]|(?<=\d)\{(?=,\})|(?<=\d\{,)\}"), ""),
    (re.compile(r"\\([%$#&_])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\approx(?![A-Za-z])"), "="),
    (re.compile(r"\^ ?[{(] ?([-+]?[0-9]{1,9}) ?[})]"), r"^\1"),
    (re.compile(r"\^ ?\{? ?\\circ ?\}?"), "\u00b0"),
    (re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|mbox) ?" + _IN_BRACES), r" \1"),
    (re.compile(r"\\[dtc]?frac ?" + _IN_BRACES + " ?" + _IN_BRACES), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac ?([0-9]) ?([0-9])(?![0-9])"), r" \1/\2 "),
    (re.compile(r"\\(?:boxed|fbox) ?" + _IN_BRACES), r" \1 "),
    (re.compile(r"</?(?!(?:answer|reasoning|think)\b)[A-Za-z][^<>]{0,200}>"), " "),  # HTML; tags of the form are none
    (re.compile(r"(?<=[\d)])\*\*(?=[-+(]?\d)"), "^"),
    (re.compile(r"(?<![\w*])(\*{1,3}|_{1,2})(?! )([^*]{1,200})\1(?![\w*])"), r" \2 "),
    (re.compile(rf"\b(?:US|CA|HK|NZ|[ACSR])(?=\$)|\b{_CURRENCY}\.?(?= ?[-+]?[.\d])"), "$"),
    (re.compile(r"\$[ $]+"), "$"),
    (re.compile(r"\b(?:minus|negative) (?=\$?[.\d])", re.IGNORECASE), "-"),
    (re.compile(r"\b[A-Za-z]\([^()]{1,50}\)"), " f "),
]


def _plain(text: str) -> str:
    """The text with one way of writing for signs, digits, fractions, powers, currencies and markup."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda raised: "^" + raised[0].translate(_RAISED), text)
        text = "".join(char if char.isascii() else _ascii(char) for char in text)
    for pattern, form in _REWRITTEN:
        text = pattern.sub(form, text)
    return " ".join(text.split())


def _ascii(char: str) -> str:
    """A character in the form that is read, such as '5' for a full-width 5 and ' 1/2 ' for a half."""
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    category = unicodedata.category(char)
    if category == "No" and "\u2044" in (fraction := unicodedata.normalize("NFKC", char)):
        return " " + fraction.replace("\u2044", "/") + " "
    return {"Sc": "$", "Zs": " "}.get(category, char.translate(_OTHER_FORMS))


# Longer numbers are malformed: their exact value would cost time and memory that grow faster than the text.
_MOST_DIGITS = 1000
# Digits and separators between them, whether or not they make a number, then a power of ten.
_RUN = r"(?:(?<![\w.])\.)?[0-9](?:[0-9]|[.,'_](?=[0-9])|[ ](?=[0-9]{3}(?![0-9])))*+(?:[eE][-+]?[0-9]{1,9}(?!\w|\.\d))?+"
_POWER = r"\^(?P<%s>[-+]?[0-9]{1,9})"
# All after the first run is optional and possessive, so that no text is read twice.
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+][ ]?)?+ (?:(?P<money>\$)[ ]?(?P<inner_sign>[-+])?+)?+
    (?:(?P<whole>[0-9]{{1,15}})[ ](?:and[ ])?(?=[0-9]{{1,15}}[ ]?/[ ]?[0-9]))?+
    (?P<top>{_RUN}) (?:{_POWER % "top_power"})?+
    (?:[ ]?/[ ]?(?P<bottom>{_RUN}) (?:{_POWER % "bottom_power"})?+)?+
    (?:[ ]?[*xX][ ]?10{_POWER % "ten"})?+
    (?:[ ]?(?P<scale>(?i:dozen|hundred|thousand|million|billion|trillion|mn|bn))s?\b
      |(?P<letter>[ ]?[kKMmBb])(?![\w/^]))?+
    (?P<percent>[ ]?(?:%|(?i:percent|per[ ]cent|pct)\b))?+
    """,
    re.VERBOSE,
)
_DECIMAL = re.compile(
    r"([0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:[ ][0-9]{3})+|[1-9][0-9]{0,2}(?:['_][0-9]{3})+|"
    r"[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3})(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"mn": 10**6, "bn": 10**9}
# Without a currency before them, these are metres and bits, or after a space kelvin and the like.
_LETTERS_OF_MONEY = {"k": 10**3, "m": 10**6, "b": 10**9}
_LETTERS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
# Between two numbers, or after one: a calculation, a ratio, a range, or two numbers side by side.
_JOINS = re.compile(r"[ ()]*(?:[-+*/^:]|x|X|times|plus|minus|over|divided by|to)[ ()]*|[)\]]?[\[(]?| ")
_GOES_ON = re.compile(r" ?[+*^] ?[\w($-]| ?[-/] ?(?:\(|[A-Za-z](?![A-Za-z]))")


class _MalformedError(Exception):
    """Digits that are no number, such as '1.2.3' or '1,20'."""


class _Side:
    """The numbers of a text without an equals sign.

    Attributes:
      numbers: as they stand in it.
      calculates: operators join its numbers, or a number and a letter, so that it is no number itself.
      explains: it says in words what its number is, as '2 hours' does, and offers no alternatives.
    """

    def __init__(self, text: str) -> None:
        """Reads all of the text.

        Raises:
          _MalformedError: it has digits that are no number.
        """
        self.numbers: list[Number] = []
        self.calculates = False
        end = 0
        for match in _NUMBER.finditer(text):
            start = match.start()
            before, earlier = text[max(start - 1, 0) : start], text[max(start - 2, 0) : max(start - 1, 0)]
            signed = match["sign"] is not None
            if (before.isalpha() or before == "_") and not signed:
                continue  # digits of a name, such as x1
            if before == "^" and earlier.isalpha():
                continue  # the power of a unit, such as cm^2
            gap = text[end:start]
            joined = bool(self.numbers) and _JOINS.fullmatch(gap) is not None
            operated = (before if before != " " else earlier) in tuple("+-*/^")
            self.calculates |= joined or operated or (signed and not _is_sign(before, earlier, match["sign"]))
            self.numbers.append(_number(match))
            end = match.end()
            self.calculates |= _GOES_ON.match(text, end) is not None
        words = set(re.findall(r"[a-z]+", text.lower()))
        self.explains = bool(words) and not words & {"or", "and"} and "," not in text and ";" not in text


def _is_sign(before: str, earlier: str, sign: str) -> bool:
    """True if a plus or minus belongs to the number after it: 'is -5', ': - 5', but not 'x - 5', 'x-5' or ')-5'."""
    if before == " ":
        return not (sign.endswith(" ") and (earlier.isalnum() or earlier in tuple(")]%")))
    return not (before.isalnum() or before in tuple(")]%_"))


def _number(match: re.Match[str]) -> Number:
    top, bottom = _term(match["top"], match["top_power"])
    if match["bottom"]:
        over, under = _term(match["bottom"], match["bottom_power"])
        if not over:
            raise _MalformedError
        top, bottom = top * under, bottom * over
    top += int(match["whole"] or 0) * bottom
    top, bottom = _shifted(top, bottom, match["ten"])
    if match["scale"]:
        top *= _SCALES[match["scale"].lower()]
    elif match["letter"]:
        letter = match["letter"]
        top *= _LETTERS_OF_MONEY[letter.strip().lower()] if match["money"] else _LETTERS.get(letter, 1)
    negative = (match["sign"] or "").startswith("-") != (match["inner_sign"] == "-")
    shared = math.gcd(top, bottom)
    return Number((-top if negative else top) // shared, bottom // shared, match["percent"] is not None)


def _term(run: str, power: str | None) -> tuple[int, int]:
    """Numerator and denominator of digits with their separators, to a power."""
    found = _DECIMAL.fullmatch(run)
    if found is None or len(run) > _MOST_DIGITS:
        raise _MalformedError
    whole, part = re.sub(r"\D", "", found[1]), found[2] or ""
    top, bottom = _shifted(int(whole + part), 10 ** len(part), found[3])
    exponent = 1 if power is None else int(power)
    if abs(exponent) * len(f"{top}{bottom}") > 2 * _MOST_DIGITS or (exponent < 0 and not top):
        raise _MalformedError
    return (top**exponent, bottom**exponent) if exponent >= 0 else (bottom**-exponent, top**-exponent)


def _shifted(top: int, bottom: int, ten: str | None) -> tuple[int, int]:
    """A fraction times a power of ten."""
    power = int(ten or 0)
    if abs(power) > _MOST_DIGITS:
        raise _MalformedError
    return top * 10 ** max(power, 0), bottom * 10 ** max(-power, 0)
