"""Encodes observations, after a turn of the model or a question, and sorts stop strings into texts and tokens."""

import contextlib
import functools
from collections.abc import Mapping, Sequence

from podrl.data.tokenizer import ORDINARY, Tokenizer

# Stands for the model's words in renderings, to find the text that a template writes after these words. It contains a
# thought, to notice a template that removes thoughts from earlier turns.
_WORDS = "<think>\nfirst\n</think>\n\nthen"
# Two characters of Unicode's private use area. They enclose a text in a rendering, so that it can be found again.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_QUESTION = "Question?"  # stands for a question in a rendering, to find the text that a template writes around it


class Dialogue:
    """Encodes text that is appended to a sample after the model's words; sampled tokens are never encoded again."""

    def __init__(self, tokenizer: Tokenizer):
        """Stores the tokenizer; the first turn that is encoded with its chat template examines the template."""
        self.tokenizer, self.decode = tokenizer, tokenizer.decode

    def encode(self, text: str | Sequence[str], role: str = "raw", *, last: int | None = None) -> list[int]:
        """Encodes an observation on its own; special tokens written in its text stay text.

        Args:
          text: text of the observation, or several texts. If the role is 'tool' and the template has messages of tools,
            each text is one message; otherwise the texts are joined with an empty line between them.
          role: 'raw' for the text alone; 'user' or 'tool' for three parts as the chat template writes them: the end of
            the model's turn, a turn of this role with the text, and the opening of the model's next turn.
          last: id of the sample's last token; None for a token that is not special. If the sample ends with an end
            token of the model, this token is not written again.

        Returns:
          Token ids of the observation, without the sample's last token.

        Raises:
          ValueError: no turn of this role can follow a model's words in the chat template.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if role == "raw" or (role := self._role(role)) == "user":
            texts = ["\n\n".join(texts)]
        if role == "raw":
            return self.tokenizer.encode_plain(texts[0], behind=ORDINARY if last is None else last)
        written, values = [self._behind(role, texts)], []
        if any(map(self.tokenizer.holds_special, texts)):
            written, values = self._around(role, texts)
        mark = "" if last is None else self.tokenizer.token_text(last)
        if mark and last in self.tokenizer.eos_ids:
            written[0] = written[0].removeprefix(mark)
        tokens = [ORDINARY if last is None else last]  # the sample's last token; the return statement cuts it off
        tokens += self.tokenizer.encode(written[0], behind=tokens[-1])
        for inside, after in zip(values, written[1:], strict=True):
            tokens += self.tokenizer.encode_plain(inside, behind=tokens[-1])
            tokens += self.tokenizer.encode(after, behind=tokens[-1])
        return tokens[1:]

    @functools.cached_property
    def _frame(self) -> tuple[str, str]:
        """The text that the chat template writes around a question: (before it, after it); ('', '') for none.

        The text after the question is the end of the user's turn and the opening of the model's turn.
        """
        ask = {"role": "user", "content": _QUESTION}
        for messages in ([ask], [{"role": "system", "content": "system"}, ask]):  # some templates demand a system turn
            with contextlib.suppress(ValueError):
                before, found, after = self.tokenizer.apply_chat_template(messages).partition(_QUESTION)
                return (before, after) if found else ("", "")
        return "", ""

    @functools.cached_property
    def _strips(self) -> bool:
        """True if the chat template removes white space at the end of a user's turn."""
        try:
            padded = self.tokenizer.apply_chat_template([{"role": "user", "content": f"{_QUESTION} \n"}])
        except ValueError:
            return False
        return padded == "".join([self._frame[0], _QUESTION, self._frame[1]])

    @property
    def closing(self) -> str:
        """The text that the chat template writes after the question of a prompt; '' without a chat template."""
        return self._frame[1]

    def without_closing(self, text: str, tokens: Sequence[int]) -> tuple[str, list[int]] | None:
        """Cuts `closing` off a prompt, so that the user's turn can go on.

        Args:
          text: text of the prompt.
          tokens: token ids of the prompt.

        Returns:
          (text, token ids) up to the end of the question. None if the prompt does not end with `closing`, or if it has
          other tokens than its text.
        """
        if not self.closing or not text.endswith(self.closing):
            return None
        cut = text.removesuffix(self.closing)
        for start in (False, True):  # a prompt that the data wrote in the form of the chat template has a start token
            if self.tokenizer.encode(text, start=start) == list(tokens):
                return (cut, ids) if (ids := self.tokenizer.encode(cut, start=start)) else None
        return None

    def opening(self, text: str, *, prompt: str, closing: str, last: int) -> list[int]:
        """Encodes an observation that goes on with the question of a prompt, after an empty line.

        Args:
          text: text of the observation; '' for none.
          prompt: text of the prompt, which ends with its question.
          closing: text that the chat template writes after the question; '' for a prompt of plain text, after which the
            observation is a paragraph of its own.
          last: id of the prompt's last token.

        Returns:
          Token ids of the observation and of `closing`.
        """
        if text and prompt.strip() and prompt != self._frame[0]:  # otherwise the observation is the whole question
            text = "\n\n"[len(prompt) - len(prompt.rstrip("\n")) :] + text
        if closing and self._strips:
            text = text.rstrip()
        elif text and not closing:
            text = text.removesuffix("\n") + "\n"
        tokens = [last]
        tokens += self.tokenizer.encode_plain(text, behind=last)
        tokens += self.tokenizer.encode(closing, behind=tokens[-1])
        return tokens[1:]

    def stops(self, strings: Sequence[str]) -> tuple[tuple[str, ...], Mapping[int, str]]:
        """Splits stop strings into (strings that are text, {token id: string that is this one special token}).

        Raises:
          ValueError: a string holds a special token and other text: decoded text has no special tokens, so it never
            contains such a string.
        """
        texts, ids = [], {}
        for string in strings:
            ids_of_string = self.tokenizer.encode(string)
            special = [i for i in ids_of_string if not self.tokenizer.decode([i]) and self.tokenizer.token_text(i)]
            if not special:
                texts.append(string)
            elif self.tokenizer.token_text(special[0]) == string:
                ids[special[0]] = string
            else:
                raise ValueError(
                    f"The stop string {string!r} holds the special token {self.tokenizer.token_text(special[0])!r} of "
                    f"{self.tokenizer.directory}, which decoded completions do not contain: stop at this token alone, "
                    "or at text without it (rollout.stop_strings, the environment's stop=)."
                )
        return tuple(texts), ids

    def check_template(self, role: str = "user") -> None:
        """Checks that a turn of a role can follow the model's words in the chat template.

        Raises:
          ValueError: the tokenizer has no chat template, the template refuses the turn, or it rewrites the model's
            earlier turns.
        """
        self._role(role)

    def check_tags(self, tags: Sequence[str]) -> None:
        """Checks that tags hold no special tokens, because completions and observations are decoded without them.

        Raises:
          ValueError: a tag holds a special token; the message names the tag.
        """
        for tag in tags:
            if self.tokenizer.holds_special(tag):
                raise ValueError(
                    f"The tag {tag!r} of env.parser holds a special token of {self.tokenizer.directory}: completions "
                    "are decoded without special tokens, so no call would be found. Choose another env.parser, or add "
                    "the tag to the tokenizer as a token that is not special."
                )

    @functools.lru_cache  # noqa: B019 - there is one Dialogue per tokenizer, with two entries: user and tool
    def _role(self, role: str) -> str:
        """Returns the role with which the template writes a turn; 'user' for a tool if the template has no such role.

        Raises:
          ValueError: the template refuses the role, or rewrites the model's earlier turns.
        """
        ask = {"role": "user", "content": "ask"}
        message = {"role": "assistant", "content": _WORDS}
        try:
            once = self.tokenizer.apply_chat_template([ask, message, {"role": role, "content": "more"}])
            again = self.tokenizer.apply_chat_template(
                [ask, message, {"role": role, "content": "more"}, message, {"role": role, "content": "last"}]
            )
        except ValueError:
            if role != "tool":
                raise
            return self._role("user")
        if role == "tool" and "more" not in once.rpartition(_WORDS)[2]:  # the template does not write the tool's turn
            return self._role("user")
        # The two renderings may differ in the white space between turns, as with Hermes' template. This difference does
        # no harm, because a sample keeps its tokens. A prompt may end with the opening of a thought, which the model's
        # words continue.
        packed, words = _packed(once), _packed(_WORDS)
        opened = next(n for n in range(len(words), -1, -1) if packed.endswith(words[:n]))
        if again.count(_WORDS) != 2 or not _packed(again).startswith(packed + words[opened:]):
            raise ValueError(
                f"The chat template of {self.tokenizer.directory} rewrites the model's earlier turns (it makes "
                f"{once!r} of two turns), so say(role={role!r}) cannot follow sampled tokens. "
                "Use role='raw' and write the turns yourself, or give the model a chat_template.jinja that leaves them."
            )
        return role

    def _behind(self, role: str, texts: Sequence[str]) -> str:
        """Renders the text that the chat template writes between the model's words and its next words.

        Between them the template writes one turn of `role` for each of `texts`.
        """
        turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _WORDS}]
        whole = self.tokenizer.apply_chat_template([*turns, *({"role": role, "content": text} for text in texts)])
        return whole[whole.index(_WORDS) + len(_WORDS) :]

    def _around(self, role: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits the rendering of `_behind`: (the template's text around the turns' texts, the turns' texts)."""
        texts = [text.replace(_OPEN, "").replace(_CLOSE, "") for text in texts]
        whole = self._behind(role, texts)
        written, values = [whole], []
        for form in (str, str.strip):  # many templates strip a turn's text, but cannot strip it inside the marks
            parts = self._behind(role, [_OPEN + form(text) + _CLOSE for text in texts]).split(_OPEN)
            pairs = [part.partition(_CLOSE)[::2] for part in parts[1:]]
            written, values = [parts[0], *(after for _, after in pairs)], [inside for inside, _ in pairs]
            if "".join([written[0], *(inside + after for inside, after in pairs)]) == whole:
                break
        return written, values


def _packed(text: str) -> str:
    return "".join(text.split())
