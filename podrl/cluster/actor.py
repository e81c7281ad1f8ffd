"""The actor: the trained policy, its optimizer, and the reference policy that it is compared with."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from podrl import offload
from podrl.algorithms.distill import Distillation, IdRows, Teacher
from podrl.mappings import Metrics
from podrl.mesh.backlog import Backlog
from podrl.models import parameters
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.hf_config import read_config
from podrl.models.pretrained import check_vocab, from_pretrained
from podrl.trainer import packing
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.distill import TeacherParts, teacher_parts
from podrl.trainer.objective import Forward, TokenLoss
from podrl.trainer.pack_shape import pack_shape
from podrl.trainer.state import abstract_like, abstract_state, init_state, put_batch
from podrl.trainer.step import (
    TokenWeights,
    make_logprob_fn,
    make_token_score_fn,
    make_token_weight_fn,
    make_train_step,
)
from podrl.types import Batch, Layout, PyTree, Rows, TrainState, unrouted

_NO_REFERENCE = "There is no reference policy: call RLCluster.keep_reference() before training starts."


class Actor:
    """The trained policy on its mesh. Under LoRA its frozen base is also the reference, unless another model is named.

    Attributes:
      model: configuration of the model.
      mesh: mesh that the model lives on.
      training: settings of the actor's training.
      loaded: True if this process has devices of the mesh; if not, `state` and `frozen` are shapes only.
      optimizer: optimizer of the trainable parameters.
      state: trainable parameters, optimizer state and step.
      frozen: parameters that are not trained: the base under LoRA, otherwise few or none.
      reference: parameters of the reference policy, perhaps in the host's memory (`trainer.offload`); None before
        `keep_reference`.
      reference_model: configuration of the reference policy; before `keep_reference`, the actor's configuration.
      average: moving average of the trainable parameters, in float32; None before `keep_average`.
    """

    def __init__(
        self,
        source: Any,
        mesh: Mesh,
        training: RLTrainingConfig,
        *,
        loaded: bool,
        temperature: float,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ):
        """Puts the actor on its mesh.

        Args:
          source: a Hugging Face directory, or the result of `podrl.models.from_pretrained`.
          mesh: mesh that the model goes to.
          training: optimizer and dtypes.
          loaded: True if this process has devices of the mesh.
          temperature: sampling temperature; log-probabilities belong to the distribution at this temperature.
          lora: adapters to add if `source` is a directory.
          seed: seed of fresh adapters and of dropout.
        """
        self.mesh, self.loaded, self.training, self._seed = mesh, loaded, training, seed
        self._temperature = temperature
        self._param_dtype = jnp.dtype(training.param_dtype)
        decoder: Any = source
        is_path = isinstance(source, str | os.PathLike)
        if is_path and loaded:
            decoder = from_pretrained(os.fspath(source), mesh=mesh, dtype=self._param_dtype, lora=lora, seed=seed)
        if is_path and not loaded:
            self.model: ModelConfig = dataclasses.replace(read_config(source), lora=lora or LoraConfig())
        else:
            self.model = decoder.config
        self.optimizer = training.optimizer()
        if loaded:
            self.state, self.frozen = init_state(self._placed(decoder.params), self.model, self.optimizer, mesh)
        else:
            self.state, self.frozen = abstract_state(self.model, self.optimizer, mesh, training.param_dtype)
        self.frozen = training.place_frozen(self.frozen, self.model.lora, mesh)
        self.reference: PyTree | None = None
        self._reference_copy: Callable[[PyTree | None], PyTree] = lambda params: params
        self.average: PyTree | None = None
        self.reference_model = self.model
        self._step: Callable | None = None
        self._logprobs = self._reference_logprobs = self._logprob_fn(self.model)
        of = {"temperature": temperature, "dtype": training.dtype}
        self._token_scores = make_token_score_fn(self.model, mesh, **of)
        self._token_weights: Callable | None = None
        self._teacher_parts = TeacherParts({})
        self._backlog = Backlog()

    def _logprob_fn(self, model: ModelConfig) -> Callable:
        return make_logprob_fn(model, self.mesh, temperature=self._temperature, dtype=self.training.dtype)

    def _placed(self, params: PyTree) -> PyTree:
        abstract = parameters.abstract_params(self.model, self.mesh, self._param_dtype)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        # Integer base weights (lora.base_dtype) and their scales keep their dtype.
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, abstract)
        return jax.jit(lambda tree: jax.tree.map(lambda x, t: x.astype(t), tree, dtypes), out_shardings=shardings)(
            jax.device_put(params, shardings)
        )

    def params(self) -> PyTree:
        """Returns the whole parameter tree, trainable and frozen leaves together, without a copy."""
        return parameters.join_trainable(self.state.params, self.frozen)

    def abstract_state(self) -> TrainState:
        """Returns shapes and shardings of `state`, for restoring a checkpoint."""
        return abstract_like(self.state, self.optimizer, self.mesh)

    def keep_reference(self, source: str | os.PathLike | None = None, ids: int = 0) -> None:
        """Fixes the reference policy: the model `source`, else the base under LoRA, else a copy of the present weights.

        Args:
          source: a Hugging Face directory; None to use the base or a copy. The model may have another architecture than
            the actor; the caller ensures that its token ids mean the same tokens as the actor's.
          ids: number of token ids of the actor's tokenizer; `source` must have an embedding for each.

        Raises:
          ValueError: `source` has too few embeddings.
        """
        if source is not None:
            loaded = from_pretrained(os.fspath(source), mesh=self.mesh, dtype=self._param_dtype)
            check_vocab(loaded.config, ids)
            self.reference, self.reference_model = loaded.params, loaded.config
            if loaded.config != dataclasses.replace(self.model, lora=LoraConfig()):
                self._reference_logprobs = self._logprob_fn(loaded.config)
        elif self.model.lora.rank:
            self.reference = self.frozen
        elif self.training.hosts_reference:
            self.reference = self.params()  # copied to the host's memory below, without a second copy on the devices
        else:
            copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(self.state.params)
            self.reference = parameters.join_trainable(copy, self.frozen)
        if self.training.hosts_reference and self.reference is not self.frozen:
            key = f"trainer.offload={self.training.offload!r}"
            self.reference = offload.tree_on_host(self.reference, self.mesh, key)
            self._reference_copy = offload.copier(self.reference)

    def _reference_on_devices(self) -> PyTree:
        """Returns the weights of the reference; copies them to the devices if they wait in the host's memory."""
        return self._reference_copy(self.reference)

    def keep_average(self) -> None:
        """Begins a moving average of the trainable parameters at their present values; the average is in float32."""
        copy = jax.jit(
            lambda params: jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params),
            out_shardings=jax.tree.map(lambda x: x.sharding, self.state.params),
        )
        self.average = copy(self.state.params)

    def move_average(self, rate: float) -> None:
        """Moves the average towards the present parameters by the share `rate` (0 to 1) of the distance."""
        self.average = _moved(self.average, self.state.params, rate)

    def prepare(self, loss: TokenLoss, weigh: TokenWeights | None = None, teacher: Distillation | None = None) -> None:
        """Builds the train step that minimises `loss`, and the program of `token_weights`.

        Args:
          loss: loss of a batch's tokens.
          weigh: function that computes the weight of each token in an update, for the program of `token_weights`; None
            builds no such program.
          teacher: settings of the teacher; if its KL is a term of the loss (not `teacher.sampled`), the rows of a batch
            are TaughtRows or TopKRows. None for no teacher.

        Raises:
          ValueError: the teacher lacks token ids of the policy, or the policy has fewer ids than `teacher.top_k`.
        """
        forward = Forward(config=self.model, temperature=self._temperature, mesh=self.mesh, dtype=self.training.dtype)
        how = teacher_parts(teacher, forward, self.reference_model) if teacher is not None else TeacherParts({})
        self._teacher_parts = how
        self._step = make_train_step(
            self.model,
            loss,
            self.optimizer,
            self.mesh,
            temperature=self._temperature,
            dtype=self.training.dtype,
            param_dtype=self.training.param_dtype,
            remat=self.training.remat,
            seed=self._seed,
            balance_coef=self.training.balance_coef,
            **how.step,
        )
        if weigh is not None:
            of = {"temperature": self._temperature, "dtype": self.training.dtype}
            self._token_weights = make_token_weight_fn(self.model, weigh, self.mesh, **of)

    def put(self, batch: Batch[Rows]) -> Batch[Rows]:
        """Copies a packed host batch onto the actor's mesh."""
        return put_batch(batch, self.mesh)

    def update(self, batch: Batch[Any]) -> Metrics:
        """Makes one optimizer update from a batch on the mesh; returns metrics by name, which stay on the device.

        Raises:
          ValueError: `prepare` was not called before.
        """
        if self._step is None:
            raise ValueError("The actor needs a loss: call RLCluster.actor.prepare(loss) first; learners do.")
        fixed = (self.frozen, self._reference_on_devices()) if self._teacher_parts.whole else self.frozen
        self.state, metrics = self._step(self.state, fixed, batch)
        self._backlog.add(metrics)
        return metrics

    def logprobs(self, batch: Batch[Layout]) -> Array:
        """Scores every packed token of a batch on the mesh: log p (A, B, T), nats."""
        return self._noted(self._logprobs(self.params(), batch))

    def token_scores(self, batch: Batch[Layout]) -> tuple[Array, Array]:
        """Scores every packed token of a mesh batch: (log p, entropy of its distribution), each (A, B, T) nats."""
        return self._noted(self._token_scores(self.params(), batch))

    def token_weights(self, batch: Batch[Any]) -> tuple[Array, Array]:
        """Computes the weight that an update would now give to each token: (weight, clipped), each (A, B, T)."""
        assert self._token_weights is not None, "call prepare(loss, weigh) first"
        return self._noted(self._token_weights(self.params(), batch))

    def teaching(self, batch: Batch[Layout]) -> Any:
        """Returns the policy's likeliest ids at each token's position and their log-probabilities under the teacher."""
        assert self._teacher_parts.score is not None, "call prepare(loss, weigh, teacher) first"
        return self._noted(self._teacher_parts.score(self.params(), self._reference_on_devices(), batch))

    def likely_ids(self, batch: Batch[Layout]) -> Array:
        """Returns the policy's K likeliest ids at each token's position: (A, B, T, K)."""
        assert self._teacher_parts.likely is not None, "call prepare(loss, weigh, teacher) first"
        return self._noted(self._teacher_parts.likely(self.params(), batch))

    def teacher_id_logprobs(self, teacher: Teacher, batch: Batch[IdRows]) -> Array:
        """Scores the K ids at each token's position under a teacher that reads its own prompts: (A, B, T, K), nats."""
        assert self._teacher_parts.score_ids is not None, "call prepare(loss, weigh, teacher) first"
        own = {"current": self.params, "ema": self._average}
        return self._noted(self._teacher_parts.score_ids(own.get(teacher, self._reference_on_devices)(), batch))

    def _average(self) -> PyTree:
        """Returns the whole parameter tree, with the moving average in the place of the trainable leaves."""
        assert self.average is not None, "call keep_average first"
        return parameters.join_trainable(self.average, self.frozen)

    def reference_logprobs(self, batch: Batch[Layout]) -> Array:
        """Scores every packed token under the reference policy: log p (A, B, T), nats.

        The reference routes tokens to experts itself; recorded routes of the batch are not used.

        Raises:
          ValueError: `keep_reference` was not called before.
        """
        if self.reference is None:
            raise ValueError(_NO_REFERENCE)
        return self._noted(self._reference_logprobs(self._reference_on_devices(), unrouted(batch)))

    def average_logprobs(self, batch: Batch[Layout]) -> Array:
        """Scores every packed token under the moving average of the policy: log p (A, B, T), nats.

        The average routes tokens to experts itself; recorded routes of the batch are not used.
        """
        return self._noted(self._logprobs(self._average(), unrouted(batch)))

    def sample_logprobs(
        self,
        tokens_BT: Int[np.ndarray, "B T"],
        length_B: Int[np.ndarray, " B"],
        *,
        longest: int,
        reference: bool = False,
    ) -> Float[np.ndarray, "B T"]:
        """Scores right-padded sequences by the actor or the reference.

        Args:
          tokens_BT: token ids, right-padded.
          length_B: number of tokens in each sequence.
          longest: bound on `length_B`, for the shape of the packed rows.
          reference: True for the reference policy, False for the actor.

        Returns:
          log p of each token, nats, in the layout of `tokens_BT`.
        """
        score = self.reference_logprobs if reference else self.logprobs
        shape = pack_shape(self.training, self.mesh, sequences=len(tokens_BT), max_length=longest)
        placement = packing.place(length_B, shape)
        values_ABT = score(self.put(placement.batch(placement.layout(tokens_BT))))
        return placement.unpack(np.asarray(jax.device_get(values_ABT)), tokens_BT.shape[1])

    def _noted(self, scores: PyTree) -> PyTree:
        self._backlog.add(scores)
        return scores


@functools.partial(jax.jit, donate_argnums=0)
def _moved(average: PyTree, params: PyTree, rate: float | Array) -> PyTree:
    return jax.tree.map(lambda a, p: a + rate * (p.astype(jnp.float32) - a), average, params)
