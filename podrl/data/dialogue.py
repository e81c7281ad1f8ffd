"""Observations as tokens behind a model's words, and the strings at which its turns end as an engine can find them."""

import functools
from collections.abc import Mapping, Sequence

from podrl.data.tokenizer import ORDINARY, Tokenizer

# Stands for the model's words where a template is asked what it writes behind them. Templates that drop a model's
# thoughts from earlier turns show it on these.
_WORDS = "<think>\nfirst\n</think>\n\nthen"
# Stand on both sides of a text where a template is asked what it makes of it; of Unicode's private use.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class Dialogue:
    """Encodes what is added to a sample after the model's words; sampled tokens are never encoded again."""

    def __init__(self, tokenizer: Tokenizer):
        """Of a tokenizer; its chat template is read when the first turn is made of it."""
        self.tokenizer, self.decode = tokenizer, tokenizer.decode

    def encode(self, text: str | Sequence[str], role: str = "raw", *, last: int | None = None) -> list[int]:
        """Tokens of an observation, encoded alone; special tokens written in its text stay text.

        Args:
          text: the observation; several become messages of their own where the role is a tool's.
          role: 'raw' for the text as it is; 'user' or 'tool' for a turn of the chat template behind the end of the
            model's turn, and the opening of the model's next one.
          last: the sample's last token: the end of the model's turn is not written again where it is that; None for
            one that is not special.

        Raises:
          ValueError: a role that the chat template does not give.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if role == "raw" or (role := self._role(role)) == "user":
            texts = ["\n\n".join(texts)]
        if role == "raw":
            return self.tokenizer.encode_plain(texts[0], behind=ORDINARY if last is None else last)
        written, given = [self._behind(role, texts)], []
        if any(map(self.tokenizer.holds_special, texts)):
            written, given = self._around(role, texts)
        mark = "" if last is None else self.tokenizer.token_text(last)
        if mark and last in self.tokenizer.eos_ids:
            written[0] = written[0].removeprefix(mark)
        tokens = [ORDINARY if last is None else last]  # the sample's own, which is cut off
        tokens += self.tokenizer.encode(written[0], behind=tokens[-1])
        for inside, after in zip(given, written[1:], strict=True):
            tokens += self.tokenizer.encode_plain(inside, behind=tokens[-1])
            tokens += self.tokenizer.encode(after, behind=tokens[-1])
        return tokens[1:]

    def stops(self, strings: Sequence[str]) -> tuple[tuple[str, ...], Mapping[int, str]]:
        """Stop strings as (those that are text, those that are one special token, by its id).

        Raises:
          ValueError: a string that holds a special token beside other text: decoded text never contains it.
        """
        texts, ids = [], {}
        for string in strings:
            special = [i for i in self.tokenizer.encode(string) if not self.tokenizer.decode([i]) and self._named(i)]
            if not special:
                texts.append(string)
            elif self.tokenizer.token_text(special[0]) == string:
                ids[special[0]] = string
            else:
                raise ValueError(
                    f"The stop string {string!r} holds the special token {self.tokenizer.token_text(special[0])!r} of "
                    f"{self.tokenizer.directory}, which is no text of a completion: stop at that token alone, or at "
                    "text without it (rollout.stop_strings, the environment's stop=)."
                )
        return tuple(texts), ids

    def check_template(self, role: str = "user") -> None:
        """Refuses a chat template in which no turn of a role can follow a model's words.

        Raises:
          ValueError: there is none, or it writes a model's earlier turns otherwise than they were.
        """
        self._role(role)

    def check_tags(self, tags: Sequence[str]) -> None:
        """Refuses tags that are special tokens: they are no text of a completion, and none of an observation.

        Raises:
          ValueError: names the tag and the token.
        """
        for tag in tags:
            if self.tokenizer.holds_special(tag):
                raise ValueError(
                    f"The tag {tag!r} of env.parser holds a special token of {self.tokenizer.directory}: what a model "
                    "says is read without special tokens, so no call would be found. Choose another env.parser, or "
                    "add the tag to the tokenizer as a token that is not special."
                )

    def _named(self, token: int) -> bool:
        return bool(self.tokenizer.token_text(token))

    @functools.lru_cache  # noqa: B019 - one per tokenizer, of two roles
    def _role(self, role: str) -> str:
        """The role under which the template takes a turn; a tool's is a user's where it knows no tools."""
        ask = {"role": "user", "content": "ask"}
        said = {"role": "assistant", "content": _WORDS}
        try:
            once = self.tokenizer.apply_chat_template([ask, said, {"role": role, "content": "more"}])
            again = self.tokenizer.apply_chat_template(
                [ask, said, {"role": role, "content": "more"}, said, {"role": role, "content": "last"}]
            )
        except ValueError:
            if role != "tool":
                raise
            return self._role("user")
        if role == "tool" and "more" not in once.rpartition(_WORDS)[2]:  # the role is passed over
            return self._role("user")
        # White space between given turns may differ, as in Hermes' form: what the sample was given stays in it.
        # A prompt may open the thought with which the model's words then go on.
        given, words = _packed(once), _packed(_WORDS)
        opened = next(n for n in range(len(words), -1, -1) if given.endswith(words[:n]))
        if again.count(_WORDS) != 2 or not _packed(again).startswith(given + words[opened:]):
            raise ValueError(
                f"The chat template of {self.tokenizer.directory} writes earlier turns of the model otherwise than "
                f"they were (it makes {once!r} of two turns): say(role={role!r}) cannot go on behind sampled tokens. "
                "Use role='raw' and write the turns yourself, or give the model a chat_template.jinja that leaves them."
            )
        return role

    def _behind(self, role: str, texts: Sequence[str]) -> str:
        """Renders the chat template's text between the model's words and its next ones, with turns in between."""
        turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _WORDS}]
        whole = self.tokenizer.apply_chat_template([*turns, *({"role": role, "content": text} for text in texts)])
        return whole[whole.index(_WORDS) + len(_WORDS) :]

    def _around(self, role: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits that rendering at the turns' texts: (what the template writes around them, the texts)."""
        texts = [text.replace(_OPEN, "").replace(_CLOSE, "") for text in texts]
        whole = self._behind(role, texts)
        written, given = [whole], []
        for form in (str, str.strip):  # many templates strip a text, which the marks prevent
            parts = self._behind(role, [_OPEN + form(text) + _CLOSE for text in texts]).split(_OPEN)
            pairs = [part.partition(_CLOSE)[::2] for part in parts[1:]]
            written, given = [parts[0], *(after for _, after in pairs)], [inside for inside, _ in pairs]
            if "".join([written[0], *(inside + after for inside, after in pairs)]) == whole:
                break
        return written, given


def _packed(text: str) -> str:
    return "".join(text.split())
