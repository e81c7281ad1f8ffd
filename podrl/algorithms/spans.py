"""Aligns two token sequences of one text by spans; a span ends where a token ends in both sequences.

By the chain rule, the log-probabilities of a span's tokens add up to the log-probability of the span. TRL's GOLD
(general online logit distillation) uses spans in the same way.
"""

import numpy as np
from jaxtyping import Float, Int


def common_spans(end_X: Int[np.ndarray, " X"], end_Y: Int[np.ndarray, " Y"]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the smallest spans of text that both sequences cover with whole tokens.

    Args:
      end_X: end of each token, in bytes from the start of the text; strictly ascending.
      end_Y: end of each token of the other sequence, in the same form.

    Returns:
      The number of each token's span, from 0, in arrays (X,) and (Y,); -1 for tokens after the last span.
    """
    shared = np.intersect1d(end_X, end_Y)
    span_X, span_Y = (np.searchsorted(shared, end, side="left") for end in (end_X, end_Y))
    return tuple(np.where(span < len(shared), span, -1) for span in (span_X, span_Y))  # pyright: ignore[reportReturnType]


def over_spans(value_BT: Float[np.ndarray, "B T"], span_BT: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """Sums values over each token's span and writes the sum to every token of the span; 0 for tokens without a span.

    Args:
      value_BT: values, one per token.
      span_BT: number of each token's span within its row, below T; -1 for no span.
    """
    B, T = value_BT.shape
    row_B1 = np.arange(B)[:, None]
    place_BT = np.where(span_BT >= 0, span_BT, T)  # column T collects the tokens without a span
    total = np.zeros((B, T + 1), value_BT.dtype)
    np.add.at(total, (row_B1, place_BT), value_BT)
    total[:, T] = 0
    return total[row_B1, place_BT]
