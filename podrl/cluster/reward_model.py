"""The reward model of a cluster: scores samples on the rollout side, on its own mesh."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from podrl.data.tokenizer import Tokenizer
from podrl.mesh import rules
from podrl.models import decoder, scalar
from podrl.models.pretrained import check_vocab
from podrl.types import PyTree

_PROBE = "The answer is 42.\n<answer>4 + 2 = 6</answer>"
_ROWS = 8  # rows that each data shard scores at a time


class RewardModel:
    """A sequence classification model with one label; its score of a sample is that of the sample's last token."""

    def __init__(self, directory: str, mesh: Mesh, tokenizer: Tokenizer, *, longest: int, dtype: str = "float32"):
        """Loads the model.

        Args:
          directory: a Hugging Face directory with `score.weight`; scores the tokens the policy sampled, so its
            tokenizer must be the policy's.
          mesh: where it goes.
          tokenizer: the policy's.
          longest: tokens of the longest sample; one program of that width scores all.
          dtype: of the weights and of computing; scores are float32.

        Raises:
          ValueError: a model without a head, or with another tokenizer.
        """
        self.mesh, self._longest = mesh, longest
        self.model, self._params = scalar.load(directory, mesh, jnp.dtype(dtype))
        check_vocab(self.model, tokenizer.vocab_size)
        if any((pathlib.Path(directory) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            own = Tokenizer(directory)
            if own.encode(_PROBE) != tokenizer.encode(_PROBE):
                raise ValueError(
                    f"The reward model in {directory} has another tokenizer than the policy: it scores the tokens the "
                    "policy sampled, so give one that was trained with the same tokenizer (reward.model)."
                )
        self._rows = _ROWS * math.prod(mesh.shape[axis] for axis in rules.DEFAULT_RULES["batch"])
        self._placed = rules.sharding_for(("batch", "time"), (self._rows, longest), mesh)

        @jax.jit
        def run(params: PyTree, tokens_BT: Array, length_B1: Array) -> Array:
            place_BT = jnp.broadcast_to(jnp.arange(longest), tokens_BT.shape)
            segment_BT = (place_BT < length_B1).astype(jnp.int32)
            hidden_BTD = decoder.hidden(
                params, tokens_BT, segment_BT, place_BT, self.model, dtype=jnp.dtype(dtype), mesh=mesh
            )
            score_BT = scalar.scores(params, hidden_BTD)
            return jnp.take_along_axis(score_BT, length_B1 - 1, axis=1)[:, 0]

        self._run = run

    def score(self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """The score of every right-padded sequence.

        Raises:
          ValueError: a sequence longer than the model was set up for.
        """
        if length_B.max(initial=0) > self._longest:
            raise ValueError(
                f"A sample has {length_B.max()} tokens but the reward model was set up for {self._longest}: "
                "rollout.max_prompt_length + rollout.max_tokens_to_generate bound it."
            )
        B = len(length_B)
        scores = []
        for first in range(0, B, self._rows):
            rows = slice(first, min(first + self._rows, B))
            count = rows.stop - rows.start
            tokens = np.zeros((self._rows, self._longest), np.int32)
            width = min(tokens_BT.shape[1], self._longest)
            tokens[:count, :width] = tokens_BT[rows, :width]
            length_B1 = np.ones((self._rows, 1), np.int32)
            length_B1[:count, 0] = length_B[rows]
            placed = (jax.device_put(x, self._placed) for x in (tokens, length_B1))
            scores.append(np.asarray(self._run(self._params, *placed))[:count])
        return np.concatenate(scores).astype(np.float64) if scores else np.zeros(0)
