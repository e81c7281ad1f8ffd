"""Reads the number that an answer gives: signs, separators, fractions, percent, powers of ten, currency and units.

Evaluations, and all of podrl's own rewards except 'recipe_number', read numbers with this module. A number keeps its
exact value, as a fraction. An answer that could be several numbers, is a calculation, or has unknowns or functions
("7 or 8", "10 - 2", "2x", "sqrt(2)") gives no number.
"""

import functools
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
      percent: True if a sign or word for percent follows the number.
    """

    top: int
    bottom: int
    percent: bool = False

    def equals(self, other: "Number") -> bool:
        """True if both are the same number; units and currencies are not compared.

        '50%' equals 0.5 and also 50, because records write shares in both ways. '50%' does not equal '0.5%'.
        """
        return any(mine == theirs for mine, theirs in self._ratios(other))

    def close(self, other: "Number", low: int, high: int) -> bool:
        """True if this number is from `low` to `high` percent of `other`; if `other` is 0, only 0 is close to it."""
        return any(
            low * abs(theirs) <= 100 * (mine if theirs > 0 else -mine) <= high * abs(theirs) if theirs else mine == 0
            for mine, theirs in self._ratios(other)
        )

    def _ratios(self, other: "Number") -> Iterator[tuple[int, int]]:
        """Yields pairs of whole numbers with the ratio this number / `other`, a pair for each way to read percent."""
        mine, theirs = self.top * other.bottom, other.top * self.bottom
        yield mine, theirs
        if self.percent != other.percent:
            yield mine * (1 if self.percent else 100), theirs * (100 if self.percent else 1)

    def __str__(self) -> str:
        """Writes the number as '12' or '1/2'."""
        return f"{self.top}/{self.bottom}".removesuffix("/1")


# Results are cached, because several reward functions read each answer, and each sample of a group needs its reference.
@functools.lru_cache(1024)
def read(text: str) -> Number | None:
    """Reads the one number that a text gives; None if the text gives no number, or several that differ.

    In an equation, the last side with a number counts. The other sides must equal it, unless they are calculations or
    name a unit in words. docs/rewards.md lists the forms. The time is linear in the length of the text.
    """
    plain = _plain(text)
    if _UNREADABLE.search(plain) or (_BRACKETED.fullmatch(plain) and _LISTS.search(plain)):
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


@functools.lru_cache(1024)
def of_reference(text: str) -> Number | None:
    """Reads the number of a reference as `read` does, but returns None for factorials and equations with unknowns.

    '5!' in a model's answer may be an exclamation, but in a reference it is a factorial. A model whose answer ends with
    'x + y = 25' or 'x^2 = 25' may have derived 25, but in a reference such an equation is about the unknowns.
    """
    equation = "=" in text and has_unknowns(text)
    return None if equation or _FACTORIAL.search(_plain(text)) else read(text)


def has_unknowns(text: str) -> bool:
    """True if a formula has letters beside its operators or after its digits, such as 'x + y' or '4ab'."""
    return _UNKNOWN.search(_plain(text)) is not None


def with_products(text: str) -> str:
    r"""Writes '4ab' as '4\cdot a\cdot b', because math-verify takes 'ab' for a unit and drops it."""
    return _COEFFICIENT.sub(lambda found: "".join(rf"\cdot {letter}" for letter in found[0]), text)


# Text that cannot be part of a plain number: roots, names of constants, inequalities, and LaTeX that was not rewritten.
_UNREADABLE = re.compile(r"[\0\\]|!=|[<>]|\*\*")
# A point, a set or an interval: brackets around all, and a comma that does not separate thousands.
_BRACKETED = re.compile(r"[^\w(\[{]{0,9}+[(\[{][^()\[\]{}]*+[)\]}][^\w]{0,9}")
_LISTS = re.compile(r"(?<!\d),|,(?!\d)|;")
_FACTORIAL = re.compile(r"[\d)]!")
_CURRENCY = r"(?:USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|CHF|Rs)"
_IN_BRACES = r"\{ ?([^{}]{1,200})\}"
_ARGUMENT = rf"(?:{_IN_BRACES}|([0-9])(?![0-9]))"
_NO_DIGIT = "(?! ?[0-9]|[.,'_eE][-+0-9])"  # no digit may follow: it would become a part of the number
_OTHER_FORMS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"\uff0b": "+", "\u2044": "/", "\u2215": "/", "\uff0f": "/", "\u00f7": "/", "\uff0e": ".", "\uff0c": ","}
    | {"\uff05": "%", "\u066a": "%", "\u2019": "'", "\u02bc": "'", "\u2248": "=", "\uff1d": "="}
    | dict.fromkeys("\u00d7\u22c5\u00b7\u2217", "*")
    | dict.fromkeys("\u2260\u2264\u2265\u00b1\u03c0\u221a\u221b\u221c\u221e\u2211\u220f\u222b\u2202", "\0")
    | dict.fromkeys("\u0305\u0307", "\0")  # a bar or a point over a repeating digit
    | dict.fromkeys("\u2308\u2309\u230a\u230b\u2223", "|")
    | {"\u2030": "/1000", "\u2031": "/10000"}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# Rewrites of LaTeX, HTML and Markdown to plain text, applied in this order. The time to try a pattern at one place is
# bounded, so each rewrite takes time linear in the text.
_REWRITTEN = [
    (re.compile(r"\A\s*[*\u2022][ \t]+"), ""),  # the mark before an item of a list
    (
        re.compile(
            r"\s+|\\(?:left|right|q?quad|(?:display|text)style|[Ll]arge|LARGE|[Hh]uge|small)(?![A-Za-z])|\\[ ()\[\]]"
        ),
        " ",
    ),
    (re.compile(r"\\[,!;:]|(?<=\d)\{(?=,\})|(?<=\d\{,)\}"), ""),
    (re.compile(r"\\([%$#&_])"), r"\1"),
    (re.compile(r"\\(?:text)?color ?\{[^{}]{1,50}\}"), ""),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\approx(?![A-Za-z])"), "="),
    (re.compile(r"\^ ?[{(] ?([-+]?[0-9]{1,9}) ?[})]"), r"^\1"),
    (re.compile(r"(?<=\d) ?\^ ?(?=[-+]?\d)"), "^"),
    (re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), "\u00b0"),
    (re.compile(r"(?<=\d)(\.\d{0,99})\\(?:overline|bar|dot) ?(?:\{ ?(\d{1,99}) ?\}|(\d))"), "\\1\x01\\2\\3"),
    (
        re.compile(
            r"\\(?:text(?:bf|rm|it|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|emph|bm|boldsymbol|bold|underline) ?"
            + _IN_BRACES
        ),
        r" \1",
    ),
    (re.compile(rf"\\(?:[dtcs]|nice)?frac ?{_ARGUMENT} ?{_ARGUMENT}{_NO_DIGIT}"), r" \1\2/\3\4"),
    (re.compile(rf"\\(?:[dtcs]|nice)?frac ?([0-9]) ?([0-9]){_NO_DIGIT}"), r" \1/\2"),
    (re.compile(r"\\(?:boxed|fbox) ?" + _IN_BRACES), r" \1 "),
    (re.compile(r"</?(?!(?:answer|reasoning|think)\b)[A-Za-z][^<>]{0,200}>"), " "),  # HTML, but not the format's tags
    (re.compile(r"(?<=[\d)])\*\*(?=[-+(]?\d)"), "^"),
    (re.compile(r"(?<![\w*])(\*{1,3}|_{1,2})(?! )([^*]{1,200})\1(?![\w*])"), r" \2 "),
    (re.compile(rf"\b(?:US|CA|HK|NZ|[ACSR])(?=\$)|\b{_CURRENCY}\.?(?= ?[-+]?[.\d])"), "$"),
    (re.compile(r"\$[ $]+"), "$"),
    (re.compile(r"\b(?:minus|negative) (?=\$?[.\d])", re.IGNORECASE), "-"),
    (re.compile(r"((?:\A|[=:(]) ?-) ?\( ?(\$?[.\d][\d.,/ ]{0,50})\)"), r"\1\2"),
    (re.compile(r"(?<=\d) and (?:a|one) half\b"), " 1/2"),
    (re.compile(r"\b[A-Za-z]'?\([^()]{1,50}\)"), " f"),
    # A factorial becomes a power of unknown value, so that '5! = 120' is a calculation with result 120, not 5 = 120.
    (re.compile(r"(?<=[\d)])!(?= ?[-+*/^=)]|[\w(])"), "^n"),
]


def _plain(text: str) -> str:
    """Rewrites a text so that signs, digits, fractions, powers, currencies and markup have one way of writing."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda raised: "^" + raised[0].translate(_RAISED), text)
        text = "".join(char if char.isascii() else _ascii(char) for char in text)
    for pattern, form in _REWRITTEN:
        text = pattern.sub(form, text)
    return " ".join(text.split())


def _ascii(char: str) -> str:
    """Rewrites a character in ASCII if it matters for numbers: a full-width 5 as '5', the sign of a half as ' 1/2 '."""
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    category = unicodedata.category(char)
    if category == "No" and "\u2044" in (fraction := unicodedata.normalize("NFKC", char)):
        return " " + fraction.replace("\u2044", "/") + " "
    return {"Sc": "$", "Zs": " "}.get(category, char.translate(_OTHER_FORMS))


# A number with more digits counts as malformed: its exact value would cost time and memory that grow faster than the
# text.
_MOST_DIGITS = 1000
# A run: digits and separators between them, even if they are no valid number; then repeating decimals, then a power of
# ten.
_RUN = (
    r"(?:(?<![\w.])\.)?[0-9](?:[0-9]|[.,'_](?=[0-9])|[ ](?=[0-9]{3}(?![0-9])))*+"
    r"(?:\.?\x01[0-9]++)?+(?:[eE][-+]?[0-9]{1,9}(?!\w|\.\d))?+"
)
_POWER = r"\^(?P<%s>[-+]?[0-9]{1,9})"
_SCALES = {
    "dozen": 12,
    "doz": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALES |= {"mn": 10**6, "bn": 10**9, "lakh": 10**5, "crore": 10**7}
# 'm', 'b' and every letter after a space count only if a currency is before the number. Otherwise they may be units,
# such as metres, bits and kelvin.
_LETTERS = {"k": 10**3, "m": 10**6, "b": 10**9}
_SCALE = re.compile("|".join(_SCALES))
# All parts after the run `top` are optional, and are matched possessively, so that no text is read twice.
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+][ ]?)?+ (?:(?P<money>\$)[ ]?(?P<inner_sign>[-+])?+)?+
    (?:(?P<whole>[0-9]{{1,15}})(?:[ ](?![0-9]{{3}}(?![0-9]))|[ ]and[ ])(?=[1-9][0-9]{{0,14}}[ ]?/[ ]?[0-9]))?+
    (?P<top>{_RUN}) (?:{_POWER % "top_power"})?+
    (?:[ ]?/[ ]?(?P<under_sign>-)?+(?P<bottom>{_RUN}) (?:{_POWER % "bottom_power"})?+)?+
    (?:[ ]?[*xX][ ]?10{_POWER % "ten"})?+
    (?:(?P<scales>(?:[ ]?(?i:{"|".join(_SCALES)})s?\b){{1,4}})
      |(?P<letter>(?(money)[ ]?[kKMmBb](?![\w^])|[kKMB](?![\w/^]))))?+
    (?P<percent>[ ]?(?:%|(?i:percent|per[ ]cent|pct)\b))?+
    """,
    re.VERBOSE,
)
_DECIMAL = re.compile(
    r"([0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:[ ][0-9]{3})+|[1-9][0-9]{0,2}(?:['_][0-9]{3})+|"
    r"[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3})(?:\.([0-9]*)(?:\x01([0-9]+))?)?(?:[eE]([-+]?[0-9]+))?"
)
# The text between two numbers if they form a calculation, a ratio or a range, or stand side by side.
_JOINS = re.compile(
    r"[ ()]*(?:[-+*/^:,;]|x|X|(?:times|plus|minus|over|divided by|to|by|of|out of|in|per|mod|and)\b)[ ()]*"
    r"|[)\]]?[\[(]?| "
)
_FUNCTIONS = r"(?:(?:arc)?(?:sin|cos|tan|cot)h?|sqrt|cbrt|log|ln|lg|exp|abs)"
# Abbreviations of one and two letters that follow a number; other short words after digits are unknowns.
_UNITS_OF_1 = "[mgshlLVWANJCF]"
_UNITS_OF_2 = (
    "(?:(?i:km|cm|mm|nm|kg|mg|lb|oz|ft|in|yd|mi|ml|dl|cl|hr|pm|am|st|nd|rd|th|hz|gb|mb|kb|tb|cc|ha|pt|qt|pc|px|pp|pg|gm"
    "|gr|dm|sq|cu|mo|yr|wk|rs|ct|kr|ea|kw)|ms|us|ns|ly|AU|mW|MW|GW|mV|kV|mA|kJ|kN|dB|Pa|eV)"
)
_UNKNOWNS = rf"(?:[abcxyz]{{3}}|[a-dw-z]{{4}}|[pqr]{{3}}|(?!{_UNITS_OF_2})[A-Za-z]{{2}})"
_WHOLE = r"(?![^\W\d_])"  # no letter follows, so the word ends here
_ENDS = r"(?=[ ]?(?:[-+*/^(),;:]|\.(?![A-Za-z])|\Z))"
_ONES = "one|two|three|four|five|six|seven|eight|nine"
# Text after a number that makes the number a part of a calculation. The pattern tells unknowns ('2x', '2ab', '2 n',
# '2 a + b') from units ('2m', '2cm') and from words ('2 a day').
_GOES_ON = re.compile(
    rf"""
    # operators, indices, and brackets
    [ ]?[+*^][ ]?[\w($\{{-] | [ ]?[-/][ ]?(?:-?\(|-?[A-Za-z](?![A-Za-z])|pi\b) | _+[0-9{{]
    | [)\]]?\([ ]?(?!{_UNITS_OF_1})[a-z][ ]?[-+*/^)]
    # unknowns, constants and functions
    | [)\]]?[ ]?(?:{_FUNCTIONS}|pi|theta|alpha|beta|lambda|[xyznie]|[xyz]{{2,3}}){_WHOLE}(?!\.[a-z]|-[A-Za-z]{{2}})
    | [)\]]?(?:(?!{_UNITS_OF_1})[A-Za-z]|{_UNKNOWNS}|pi[a-z]){_WHOLE}
    | [ ](?:(?!{_UNITS_OF_1}|[kbdtKMBGT](?![ ]?[-+*^]))[A-Za-z]|(?=[a-z]{{2}}){_UNKNOWNS}){_ENDS}(?!-[A-Za-z]{{2}})
    | [ ]?[\u03b1-\u03bb\u03bd-\u03c9\u0394\u0398\u039b\u03a3\u03a6\u03a8]
    # digits of another notation: 0x10, 1e3.5, 5C2, 5 R2; but 5 m2
    | (?!(?:[cdkm]?m|in|ft)[23]\b)[A-Za-z]{{1,4}}_?[0-9] | \.[eE][-+]?[0-9]
    | [ ](?!m[23]\b)[a-zER]_?[0-9] | [xX][0-9A-Fa-f]+\b
    # words
    | [ ](?i:and[ ](?:{_ONES})\b|(?:and[ ](?:an?[ ]|one[ ])?|an?[ ]|one[ ])(?:half|third|quarter|fourth|fifth|tenth)\b
      |(?:halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths|hundredths|thousandths|millionths)\b
      |(?:squared|cubed|factorial|per[ ]?mille?)\b | to[ ]the[ ](?:power|second|third|[a-z]+th)\b)
    | (?<=[a-z])[ ](?:and[ ])?(?i:{_ONES}|ten|eleven|twelve|[a-z]{{3,5}}teen|[a-z]{{3,5}}ty|{"|".join(_SCALES)})
      (?:-(?:{_ONES}))?(?![-\w])
    """,
    re.VERBOSE,
)
# Text that makes a whole side a calculation: functions, absolute values, and brackets that are multiplied or negated.
_FUNCTION = re.compile(
    rf"""
    (?<![A-Za-z])(?i:{_FUNCTIONS})(?:_?[0-9]+(?=[ ]?\(|[ ][0-9]))?[ ]?[-$]?(?:[(\[{{]|\.?[0-9])
    | (?<=[A-Za-z][A-Za-z])\([^()0-9]*+[0-9] | [-+*/^][ ]?\$?[ ]?[(\[{{] | \)(?=[0-9]) | \|
    | \b(?i:(?:roots?|half|third|quarter|square|cube|absolute[ ]value|reciprocal|logarithm|factorial)[ ]of
      |twice|thrice|double|triple|not
      |(?:more|less|greater|fewer|larger|smaller|higher|lower|other)[ ]than)[ ][-$]?\.?[0-9]
    """,
    re.VERBOSE,
)
# A sum or product with the words after a number, as in '5 apples + x'.
_ADDS = re.compile(
    r"[A-Za-z)\]\u00b0] ?(?:\+|\*(?! ?(?:[cdk]?m|k?g|s|h)\b)) ?[A-Za-z(]|[A-Za-z)\]\u00b0] - [b-z](?![A-Za-z])"
)
# An unknown beside an operator or a coefficient, as in 'x + y', 'x^2' and '4ab'. The units of '5 m + 3 m' and the
# constants e and i do not count as unknowns.
_LETTER = r"(?<![A-Za-z])[a-df-hjkn-rt-zA-Z]"
_UNKNOWN = re.compile(
    rf"{_LETTER} ?[-+*/^] ?[\w(]|[\w)] ?[-+*/^] ?{_LETTER}(?![A-Za-z])"
    rf"|[0-9)](?:(?!{_UNITS_OF_1}|[kKMBei])[A-Za-z]|{_UNKNOWNS}){_WHOLE}"
)
# The letters after a coefficient, up to four; names of functions and constants do not count.
_COEFFICIENT = re.compile(rf"(?<=[0-9])(?!pi|ln|lg)(?:(?!{_UNITS_OF_1}|[kKMBei])[A-Za-z]|{_UNKNOWNS}){_WHOLE}(?!\()")


class _MalformedError(Exception):
    """Digits that are not a number, such as '1.2.3' or '1,20'."""


class _Side:
    """The numbers of a text without an equals sign.

    Attributes:
      numbers: every number that is written in the text, in the order of the text.
      calculates: True if the text is a calculation and not a plain number: operators join two numbers, or the text has
        an unknown, a constant or a function.
      explains: True if the text names a unit or a thing, as '2 hours' does, so its number may differ from the number of
        the next side ('2 hours = 120 minutes'). False if 'or', 'and', a comma or a semicolon lists several things.
    """

    def __init__(self, text: str) -> None:
        """Reads all of the text.

        Raises:
          _MalformedError: the text has digits that are not a number.
        """
        self.numbers: list[Number] = []
        self.calculates = _FUNCTION.search(text) is not None
        end = 0
        for match in _NUMBER.finditer(text):
            start = match.start()
            before, earlier = text[max(start - 1, 0) : start], text[max(start - 2, 0) : max(start - 1, 0)]
            signed = match["sign"] is not None
            if (before.isalpha() or before == "_") and not signed:
                continue  # digits of a name, such as x1
            if before == "^" and earlier.isalpha():
                continue  # digits that are the power of a unit, such as cm^2
            gap = text[end:start]
            joined = bool(self.numbers) and _JOINS.fullmatch(gap) is not None
            operated = (before if before != " " else earlier) in tuple("+-*/^")
            self.calculates |= joined or operated or (signed and not _is_sign(before, earlier, match["sign"]))
            self.numbers.append(_number(match))
            end = match.end()
            self.calculates |= _GOES_ON.match(text, end) is not None
            if len(self.numbers) == 1:
                self.calculates |= _ADDS.search(text, end) is not None
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
        if not over or " " in match["top"]:  # '1 200/3' may be 1200/3 = 400, or 1 and 200/3
            raise _MalformedError
        top, bottom = top * under, bottom * over
    top += int(match["whole"] or 0) * bottom
    top, bottom = _shifted(top, bottom, match["ten"])
    for scale in _SCALE.findall((match["scales"] or "").lower()):
        top *= _SCALES[scale]
    if match["letter"]:
        top *= _LETTERS[match["letter"].strip().lower()]
    negative = sum("-" in (match[name] or "") for name in ("sign", "inner_sign", "under_sign")) % 2
    shared = math.gcd(top, bottom)
    return Number((-top if negative else top) // shared, bottom // shared, match["percent"] is not None)


def _term(run: str, power: str | None) -> tuple[int, int]:
    """Returns numerator and denominator of a run of digits and separators, raised to a power.

    Raises:
      _MalformedError: the run is not a number, or a number too long to be computed.
    """
    found = _DECIMAL.fullmatch(run)
    if found is None or len(run) > _MOST_DIGITS:
        raise _MalformedError
    whole, part, repeated = re.sub(r"\D", "", found[1]), found[2] or "", found[3] or ""
    top, bottom = int(whole + part or 0), 10 ** len(part)
    if repeated:  # 0.1666... is (16 - 1) / 90
        top, bottom = int(whole + part + repeated) - top, bottom * (10 ** len(repeated) - 1)
    top, bottom = _shifted(top, bottom, found[4])
    exponent = 1 if power is None else int(power)
    if abs(exponent) * len(f"{top}{bottom}") > 2 * _MOST_DIGITS or (exponent < 0 and not top):
        raise _MalformedError
    return (top**exponent, bottom**exponent) if exponent >= 0 else (bottom**-exponent, top**-exponent)


def _shifted(top: int, bottom: int, ten: str | None) -> tuple[int, int]:
    """Multiplies a fraction by ten to the power of `ten`, which is a whole number as text; None stands for 0."""
    power = int(ten or 0)
    if abs(power) > _MOST_DIGITS:
        raise _MalformedError
    return top * 10 ** max(power, 0), bottom * 10 ** max(-power, 0)
