"""A teacher: a frozen model that scores the samples of some sources, possibly with its own tokenizer and mesh."""

import os
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from podrl.data.tokenizer import Tokenizer, foreign
from podrl.mesh.backlog import Backlog
from podrl.models.pretrained import check_positions, check_vocab, from_pretrained
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.state import put_batch
from podrl.trainer.step import make_logprob_fn
from podrl.types import Batch, Layout, unrouted


def tokenizer_of(source: str | os.PathLike, policy: Tokenizer) -> Tokenizer | None:
    """Returns the tokenizer of a teacher's directory; None if it is the policy's, or the directory has none.

    Raises:
      ValueError: the tokenizers differ, and one of them changes the text that it encodes, so that their tokens cannot
        be compared.
    """
    if not foreign(policy.directory, source):
        return None
    own = Tokenizer(source)
    for tokenizer in (policy, own):
        if not tokenizer.splits_text:
            raise ValueError(
                f"The tokenizer of the teacher in {own.directory} is not that of the policy in {policy.directory}, and "
                f"{tokenizer.directory} changes the text that it encodes (such as its case), so that tokens of the two "
                "cannot be compared: choose a teacher with the policy's tokenizer."
            )
    return own


class Teacher:
    """A frozen model that scores samples.

    Attributes:
      name: directory of the model.
      mesh: mesh that the model lives on.
      sources: labels of the sources whose samples it scores; () for all sources that no other teacher scores.
      tokenizer: tokenizer of the model; None if it reads the policy's tokens.
      model: configuration of the model.
    """

    def __init__(
        self,
        source: str | os.PathLike,
        mesh: Mesh,
        training: RLTrainingConfig,
        policy: Tokenizer,
        *,
        sources: Sequence[str] = (),
        temperature: float,
        longest: int,
    ):
        """Loads the model.

        Args:
          source: a Hugging Face directory.
          mesh: mesh that the model goes to.
          training: training settings, whose dtypes the model uses.
          policy: tokenizer of the policy.
          sources: labels of the sources whose samples it scores; () for all sources that no other teacher scores.
          temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
          longest: number of tokens in the policy's longest sequence.

        Raises:
          ValueError: the model lacks embeddings of ids that it reads, or its tokens cannot be compared with the
            policy's. If it has too few positions for the longest sequence, the log warns.
        """
        self.name, self.mesh, self.sources = os.fspath(source), mesh, tuple(sources)
        self.tokenizer = tokenizer_of(source, policy)
        decoder = from_pretrained(self.name, mesh=mesh, dtype=jnp.dtype(training.param_dtype))
        check_vocab(decoder.config, (self.tokenizer or policy).vocab_size)
        check_positions(decoder.config, 1, longest)
        self.model, self._params, self._backlog = decoder.config, decoder.params, Backlog()
        self._score = make_logprob_fn(decoder.config, mesh, temperature=temperature, dtype=training.dtype)

    def logprobs(self, batch: Batch[Layout]) -> Array:
        """Scores every token of a packed host batch of the teacher's own ids: log p (A, B, T), nats, on its mesh."""
        found = self._score(self._params, unrouted(put_batch(batch, self.mesh)))
        self._backlog.add(found)
        return found
