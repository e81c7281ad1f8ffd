"""Observations as tokens behind a model's words, and the strings at which its turns end as an engine can find them."""

import functools
from collections.abc import Mapping, Sequence

from podrl.data.tokenizer import Tokenizer

# Stands for the model's words where a template is asked what it writes behind them. Templates that drop a model's
# thoughts from earlier turns show it on these.
_WORDS = "<think>\nfirst\n</think>\n\nthen"
# Stand on both sides of a text where a template is asked what it makes of it; of Unicode's private use.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class Dialogue:
    """What follows a model's words in the tokens of its sample; sampled tokens themselves are never encoded again."""

    def __init__(self, tokenizer: Tokenizer):
        """Of a tokenizer; its chat template is read when the first turn is made of it."""
        self.tokenizer, self.decode = tokenizer, tokenizer.decode

    def encode(self, text: str, role: str = "raw", *, last: int | None = None) -> list[int]:
        """Tokens of an observation, encoded alone; special tokens written in its text stay text.

        Args:
          text: the observation.
          role: 'raw' for the text as it is; 'user' or 'tool' for a turn of the chat template behind the end of the
            model's turn, and the opening of the model's next one.
          last: the sample's last token: the end of the model's turn is not written again where it is that.

        Raises:
          ValueError: a role that the chat template does not give.
        """
        if role == "raw":
            return self.tokenizer.encode_plain(text)
        role = self._role(role)
        before, inside, after = self._behind(role, text), "", ""
        if self.tokenizer.holds_special(text):
            before, inside, after = self._around(role, text)
        mark = "" if last is None else self.tokenizer.token_text(last)
        if mark and last in self.tokenizer.eos_ids:
            before = before.removeprefix(mark)
        return [
            *self.tokenizer.encode(before),
            *self.tokenizer.encode_plain(inside),
            *self.tokenizer.encode(after),
        ]

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

    def check_template(self) -> None:
        """Refuses a chat template of which no later turns can be made.

        Raises:
          ValueError: there is none, or it writes a model's earlier turns otherwise than they were.
        """
        self._role("user")

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
        if _WORDS not in once or not again.startswith(once + _WORDS):
            raise ValueError(
                f"The chat template of {self.tokenizer.directory} writes earlier turns of the model otherwise than "
                f"they were (it makes {once!r} of two turns): say(role={role!r}) cannot go on behind sampled tokens. "
                "Use role='raw' and write the turns yourself, or give the model a chat_template.jinja that leaves them."
            )
        return role

    def _behind(self, role: str, text: str) -> str:
        """Renders the chat template's text between the model's words and its next ones, with a turn in between."""
        turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _WORDS}]
        whole = self.tokenizer.apply_chat_template([*turns, {"role": role, "content": text}])
        return whole[whole.index(_WORDS) + len(_WORDS) :]

    def _around(self, role: str, text: str) -> tuple[str, str, str]:
        """Splits that rendering at the turn's text: (before the text, the text, behind it)."""
        text = text.replace(_OPEN, "").replace(_CLOSE, "")
        whole, parts = self._behind(role, text), ("", "", "")
        for given in (text, text.strip()):  # many templates strip it, which the marks prevent
            before, _, rest = self._behind(role, _OPEN + given + _CLOSE).partition(_OPEN)
            inside, _, after = rest.partition(_CLOSE)
            parts = (before, inside, after)
            if "".join(parts) == whole:
                break
        return parts
