"""Samples in the tokens of a teacher's own tokenizer, and the spans of text whose ends both tokenizers share.

A teacher reads the prompt that its own chat template wrote. Then it reads the policy's text up to the first token that
is not text: a special token, or a token from an environment. If that token ends the policy's turn, the teacher reads
its own end of turn instead. Later tokens and the tokens of an incomplete character are not compared.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from podrl.algorithms.spans import common_spans
from podrl.data.hint import TEACHER_PROMPT
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.types import Rollouts


@dataclasses.dataclass(frozen=True)
class TranslatedBatch:
    """A batch in the tokens of its teacher, after the prompts that the teacher reads.

    Attributes:
      rollouts: the samples in the teacher's tokens, U per row.
      span_BT: number of the span of each of the policy's tokens; -1 for a token without a span.
      theirs_BU: number of the span of each of the teacher's tokens; -1 for a token without a span.
    """

    rollouts: Rollouts
    span_BT: Int[np.ndarray, "B T"]
    theirs_BU: Int[np.ndarray, "B U"]

    @staticmethod
    def of(
        rollouts: Rollouts, own: Tokenizer, theirs: Tokenizer, *, longest: int, of_B: Bool[np.ndarray, " B"]
    ) -> "TranslatedBatch":
        """Translates samples into the tokens of a teacher's tokenizer.

        Args:
          rollouts: samples whose prompts have the field `teacher_prompt`.
          own: the policy's tokenizer.
          theirs: the teacher's tokenizer.
          longest: largest number of tokens of a sample, prompt included, that the teacher reads; further tokens are not
            compared.
          of_B: True for the samples to translate; any other sample becomes one padding token.
        """
        prompts = rollouts.prompts.fields[TEACHER_PROMPT]
        length_P = np.array([len(prompt or ()) for prompt in prompts], np.int64)
        begin_B = rollouts.prompts.length_P[rollouts.group_B]
        span_BT = np.full(rollouts.tokens_BT.shape, -1, np.int64)
        rows: list[list[int]] = []
        spans: list[np.ndarray] = []
        for b, (begin, end) in enumerate(zip(begin_B, rollouts.length_B, strict=True)):
            if not of_B[b]:
                rows.append([theirs.pad_id])
                spans.append(np.array([-1]))
                continue
            prompt = list(prompts[rollouts.group_B[b]])
            tokens = rollouts.tokens_BT[b, begin:end].tolist()
            sampled = (rollouts.mask_BT[b, begin:end] > 0).tolist()
            ids, own_n, their_n = aligned(tokens, sampled, own, theirs, behind=prompt[-1], most=longest - len(prompt))
            span_BT[b, begin : begin + len(own_n)] = own_n
            rows.append(prompt + ids)
            spans.append(np.concatenate([np.full(len(prompt), -1), their_n]))
        tokens_BU, length_B = right_padded(rows, theirs.pad_id)
        theirs_BU, _ = right_padded([row.tolist() for row in spans], -1)
        blank_BU = np.zeros(tokens_BU.shape, np.float32)
        columns: Mapping[str, np.ndarray] = {
            field.name: blank_BU.astype(getattr(rollouts, field.name).dtype)
            for field in dataclasses.fields(rollouts)
            if field.name.endswith("_BT") and getattr(rollouts, field.name) is not None
        }
        return TranslatedBatch(
            dataclasses.replace(
                rollouts,
                prompts=dataclasses.replace(rollouts.prompts, length_P=length_P),
                length_B=length_B,
                route_BTX=None,
                **{**columns, "tokens_BT": tokens_BU, "mask_BT": (theirs_BU >= 0).astype(np.float32)},
            ),
            span_BT,
            theirs_BU,
        )

    def back(
        self, value_nU: Float[np.ndarray, "n U"], chosen_n: Int[np.ndarray, " n"], rollouts: Rollouts
    ) -> Float[np.ndarray, "n T"]:
        """Sums the values of the teacher's tokens over each span; the sum is placed at the span's first sampled
        token."""
        span_nT, theirs_nU = self.span_BT[chosen_n], self.theirs_BU[chosen_n]
        row_X, at_X = np.nonzero(theirs_nU >= 0)
        total = np.zeros((len(chosen_n), rollouts.tokens_BT.shape[1] + 1), value_nU.dtype)
        np.add.at(total, (row_X, theirs_nU[row_X, at_X]), value_nU[row_X, at_X])
        first_nT = (span_nT >= 0) & (np.diff(span_nT, axis=1, prepend=-1) != 0)
        return np.where(first_nT, np.take_along_axis(total, np.maximum(span_nT, 0), axis=1), 0)


def aligned(
    tokens: Sequence[int], sampled: Sequence[bool], own: Tokenizer, theirs: Tokenizer, *, behind: int, most: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Translates the tokens that follow a prompt into a teacher's tokens, and finds the spans of text that they share.

    Args:
      tokens: the policy's ids after the prompt.
      sampled: True for each id that the policy drew.
      own: the policy's tokenizer.
      theirs: the teacher's tokenizer.
      behind: last id of the prompt in the teacher's tokens.
      most: largest number of the teacher's ids to return.

    Returns:
      The teacher's ids; the spans of the policy's tokens, up to the first token that is not text; the spans of the
      teacher's tokens. -1 stands for no span.
    """
    pieces: list[bytes] = []
    for token, drawn in zip(tokens, sampled, strict=True):
        if not drawn or not (piece := own.token_bytes(token)):
            break
        pieces.append(piece)
    whole = b"".join(pieces)
    text = _whole_characters(whole)
    ids = theirs.encode_plain(text, behind=behind) if text else []
    end_X = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    end_Y = np.cumsum([len(theirs.token_bytes(i)) for i in ids], dtype=np.int64)
    if b"".join(map(theirs.token_bytes, ids)) != text.encode():
        ids, end_Y = [], end_Y[:0]  # the teacher's tokens decode to another text
    ids, end_Y = ids[: max(most, 0)], end_Y[: max(most, 0)]
    span_X, span_Y = common_spans(end_X, end_Y)
    stop, compared = len(pieces), bool((span_X >= 0).all())
    if compared and len(ids) < most and stop < len(tokens) and sampled[stop] and tokens[stop] in own.eos_ids:
        last = int(span_X[-1]) + 1 if stop else 0
        return [*ids, theirs.turn_end_id], np.append(span_X, last), np.append(span_Y, last)
    return ids, span_X, span_Y


def _whole_characters(text: bytes) -> str:
    """Decodes the characters before the first incomplete character."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
