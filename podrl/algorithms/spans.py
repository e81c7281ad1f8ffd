"""Two token sequences of one text, aligned by the spans of text at whose ends both have a token's end.

As in GOLD of TRL (general online logit distillation), whose log-probabilities of a span are added up by the chain rule.
"""

import numpy as np
from jaxtyping import Float, Int


def common_spans(end_X: Int[np.ndarray, " X"], end_Y: Int[np.ndarray, " Y"]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the smallest spans that both sequences cover by whole tokens; (X,) and (Y,), -1 behind the last one.

    Args:
      end_X: where each token ends, in bytes from the begin of the text; strictly ascending.
      end_Y: the same of the other sequence.
    """
    shared = np.intersect1d(end_X, end_Y)
    span_X, span_Y = (np.searchsorted(shared, end, side="left") for end in (end_X, end_Y))
    return tuple(np.where(span < len(shared), span, -1) for span in (span_X, span_Y))  # pyright: ignore[reportReturnType]


def over_spans(value_BT: Float[np.ndarray, "B T"], span_BT: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T"]:
    """Gives each token the sum of the values of its span; 0 where the span is -1.

    Args:
      value_BT: a value of each token.
      span_BT: number of each token's span in its row.
    """
    B, T = value_BT.shape
    row_B1 = np.arange(B)[:, None]
    place_BT = np.where(span_BT >= 0, span_BT, T)  # the last is for tokens without a span
    total = np.zeros((B, T + 1), value_BT.dtype)
    np.add.at(total, (row_B1, place_BT), value_BT)
    total[:, T] = 0
    return total[row_B1, place_BT]
