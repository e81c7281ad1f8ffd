"""Chat templates: the Jinja programs that come with models, run under limits of memory and time."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from podrl.mappings import ChatMessage, ToolSchema

# The largest size of a number or a text that a template computes. With 8 times the length of the messages and tools
# added, it also limits the characters that the template writes, and the iterations of its loops over ranges.
MOST = 1 << 20
# Names of the template variables that hold the marks around a text inside {% generation %}.
_MARKS = ("generation_opens_", "generation_closes_")
_WIDTH = re.compile(r"[%:{]\S*\d{7}")  # finds a format that would pad a text to millions of characters


class ChatTemplate:
    """The chat template of a Hugging Face directory."""

    def __init__(self, source: str, where: str):
        """Parses the template.

        Args:
          source: text of the template.
          where: directory that the template comes from, for error messages.

        Raises:
          ValueError: the template does not parse, or holds a number or a format so large that rendering it would fill
            the memory.
        """
        self._where = where
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        self._environment.filters["tojson"] = _json
        try:
            for constant in self._environment.parse(source).find_all(nodes.Const):
                _check_constant(constant.value)
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"The chat template of {where} cannot be used: {_message_of(error)}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tokens: Mapping[str, str],
        tools: Sequence[ToolSchema] = (),
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Renders the conversation as text.

        The template cannot read the current date, so that a prompt is the same on every day.

        Args:
          messages: the conversation.
          add_generation_prompt: True to end with the opening of the model's turn.
          tokens: texts of the special tokens by their names, such as 'bos_token'.
          tools: schemas of the functions that the model may call.
          marks: two texts, written before and after each stretch of the model's words; the template puts these
            stretches inside `{% generation %}`.

        Raises:
          ValueError: the template refuses these messages, fails on them, or exceeds a limit of memory or time.
        """
        length = sum(len(str(value)) for message in messages for value in message.values())
        most = MOST + 8 * (length + (len(json.dumps(list(tools))) if tools else 0))
        self._environment.turns_left = most
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **tokens}
        variables |= {"tools": list(tools) or None, "documents": None}
        variables |= dict(zip(_MARKS, marks, strict=True))
        try:
            return "".join(_bounded(self._template.generate(variables), most))
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            why = _message_of(error)
            if "strftime_now" in why:
                why += ": it asks for today's date, which would differ between runs; write a date into the template"
            raise ValueError(f"The chat template of {self._where} refuses roles {roles}: {why}") from error


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox that also limits iterations of loops over ranges, and the size of sums, products and powers."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: object):
        super().__init__(**options)
        self.turns_left = MOST
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _refuse

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.turns_left -= len(numbers)
        if self.turns_left < 0:
            raise jinja2.TemplateError(f"it loops more than {MOST:,} times")
        return numbers

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MOST:
            raise jinja2.TemplateError(f"{operator!r} makes a value larger than {MOST:,} characters or digits")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: object, right: object) -> float:
    """Estimates the characters or digits of a sum, product or power of template values."""
    if operator == "+":
        return sum(len(value) for value in (left, right) if isinstance(value, str | bytes | list | tuple))
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            return len(sequence) * max(times, 0)
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    return 0


class _Generation(jinja2.ext.Extension):
    """Writes the marks around the text inside `{% generation %}`, the tag that templates use for the model's words."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return [opens, *inside, closes]


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded(pieces: Iterator[str], most: int) -> Iterator[str]:
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise jinja2.TemplateError(f"it writes more than {MOST:,} characters beyond the messages'")
        yield piece


def _check_constant(value: object) -> None:
    if isinstance(value, int) and abs(value) > MOST:
        raise jinja2.TemplateError(f"the number {str(value)[:20]} is larger than {MOST:,}")
    if isinstance(value, str) and (found := _WIDTH.search(value)):
        raise jinja2.TemplateError(f"the format {found[0][:40]!r} pads to millions of characters")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _message_of(error: BaseException) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
