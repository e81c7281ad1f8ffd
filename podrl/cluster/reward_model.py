"""The reward model: scores samples on the rollout side, on its own mesh."""

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from podrl.data.template import TextPart, user_turn
from podrl.data.tokenizer import Tokenizer, right_padded
from podrl.mappings import TaskColumns
from podrl.mesh import rules
from podrl.mesh.build import check_one_host
from podrl.models import decoder, scalar
from podrl.models.pretrained import check_vocab
from podrl.storage.storage import locate
from podrl.types import PyTree, Rollouts

_PROBE = "The answer is 42.\n<answer>4 + 2 = 6</answer>"
_ROWS = 8  # number of rows that each data shard scores at a time
# Longest text in the reward model's own tokens, in multiples of the policy's longest sample; the rest is cut off.
OWN_TOKENS = 2


def own_tokenizer(directory: str | os.PathLike, policy: Tokenizer) -> Tokenizer | None:
    """Returns the tokenizer of a reward model's directory; None if it is the policy's, or the directory has none."""
    if not any((locate(directory) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    found = Tokenizer(directory)
    return found if found.encode(_PROBE) != policy.encode(_PROBE) else None


class RewardModel:
    """A sequence classification model with one label; a sample's score is the score at its last token.

    A model with the policy's tokenizer, or without a tokenizer in its directory, scores the very tokens that were
    sampled. A model with another tokenizer reads the sample's text. If this model has a chat template and the record
    has a question, the text is a conversation in this template. Otherwise the text is the prompt and the completion,
    without special tokens.

    Attributes:
      mesh: mesh that the model lives on.
      model: configuration of the model.
      own: tokenizer of the model if it differs from the policy's, else None.
    """

    def __init__(self, directory: str, mesh: Mesh, tokenizer: Tokenizer, *, longest: int, dtype: str = "float32"):
        """Loads the model.

        Args:
          directory: a Hugging Face directory, local or gs://, with `score.weight`.
          mesh: mesh that the model goes to.
          tokenizer: tokenizer of the policy.
          longest: number of tokens in the policy's longest sample. One program of this width scores all samples; its
            width is OWN_TOKENS times as large if the model reads texts in tokens of its own.
          dtype: type of the weights and of the computation; scores are float32.

        Raises:
          ValueError: the model has no head or lacks embeddings for ids of its tokenizer, or the mesh spans hosts.
        """
        check_one_host(mesh, key="roles.reward.mesh")
        self.mesh, self._policy = mesh, tokenizer
        self.model, self._params = scalar.load(directory, mesh, jnp.dtype(dtype))
        self.own = own_tokenizer(directory, tokenizer)
        check_vocab(self.model, (self.own or tokenizer).vocab_size)
        self._longest = longest if self.own is None else OWN_TOKENS * longest
        parts = rules.time_shards(mesh)
        self._width = -(-self._longest // parts) * parts
        self._rows = _ROWS * rules.batch_shards(mesh)

        @jax.jit
        def run(params: PyTree, tokens_BT: Array, length_B1: Array) -> Array:
            place_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
            segment_BT = (place_BT < length_B1).astype(jnp.int32)
            hidden_BTD = decoder.hidden(
                params, tokens_BT, segment_BT, place_BT, self.model, dtype=jnp.dtype(dtype), mesh=mesh
            )
            score_BT = scalar.scores(params, hidden_BTD)
            return jnp.take_along_axis(score_BT, length_B1 - 1, axis=1)[:, 0]

        self._run = run

    def score_samples(self, rollouts: Rollouts, fields: TaskColumns) -> Float[np.ndarray, " B"]:
        """Scores every sample.

        Args:
          rollouts: the samples.
          fields: fields of the samples' records by name, one value per sample. `question`, with `system_prompt` before
            it, becomes the user's turn in the model's own chat template.

        Returns:
          One score per sample, any range.

        Raises:
          ValueError: a sample is longer than the model was set up for, or the model's chat template refuses a sample.
        """
        if self.own is None:
            return self.score(rollouts.tokens_BT, rollouts.length_B)
        return self.score(*self._encoded([self._text(rollouts, fields, b) for b in range(len(rollouts.length_B))]))

    def _text(self, rollouts: Rollouts, fields: TaskColumns, b: int) -> TextPart:
        """Formats a sample as text for the reward model, whose tokenizer is not the policy's."""
        assert self.own is not None
        if not self.own.has_chat_template or "question" not in fields:
            return TextPart(self._policy.decode(rollouts.tokens_BT[b, : rollouts.length_B[b]]))
        question, system = str(fields["question"][b]), fields["system_prompt"][b] if "system_prompt" in fields else ""
        turns = [
            {"role": "user", "content": user_turn(question, system)},
            {"role": "assistant", "content": rollouts.completions[b]},
        ]
        return TextPart(self.own.apply_chat_template(turns, add_generation_prompt=False), rendered=True)

    def _encoded(self, texts: Sequence[TextPart]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
        """Encodes texts in the model's own tokens, right-padded and cut off at the model's width."""
        assert self.own is not None
        rows = [self.own.encode(text.text, start=not text.rendered)[: self._longest] for text in texts]
        tokens_BT, length_B = right_padded(rows, self.own.pad_id)
        return tokens_BT, np.maximum(length_B, 1)

    def score(self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """Scores right-padded sequences of token ids that the model reads.

        Raises:
          ValueError: a sequence is longer than the model was set up for.
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
            tokens = np.zeros((self._rows, self._width), np.int32)
            width = min(tokens_BT.shape[1], self._longest)
            tokens[:count, :width] = tokens_BT[rows, :width]
            length_B1 = np.ones((self._rows, 1), np.int32)
            length_B1[:count, 0] = length_B[rows]
            placed = (
                jax.device_put(x, rules.sharding_for(("batch", "time"), x.shape, self.mesh))
                for x in (tokens, length_B1)
            )
            scores.append(np.asarray(self._run(self._params, *placed))[:count])
        return np.concatenate(scores).astype(np.float64) if scores else np.zeros(0)
