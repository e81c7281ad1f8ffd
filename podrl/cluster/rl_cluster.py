"""RLCluster: the models of a job in their roles, on their meshes, with everything one does to them."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Float, Int

from podrl.cluster.config import ClusterConfig, Mode, Role
from podrl.cluster.critic import Critic
from podrl.cluster.pull_link import PullLink
from podrl.cluster.reward_model import RewardModel
from podrl.data.tokenizer import Tokenizer
from podrl.mesh.backlog import Backlog
from podrl.mesh.build import local_mesh
from podrl.mesh.reshard.publish import Publisher
from podrl.models import decoder
from podrl.models import lora as lora_lib
from podrl.models.config import LoraConfig
from podrl.models.hf_config import read_config
from podrl.models.pretrained import check_vocab, from_pretrained
from podrl.rollout.config import Sampling
from podrl.trainer import packing
from podrl.trainer.objective import TokenLoss
from podrl.trainer.state import abstract_state, abstract_train_state, init_state, put_batch
from podrl.trainer.step import make_logprob_fn, make_train_step
from podrl.types import ActorCriticState, CriticBatch, Policy, Prompts, PyTree, Rollouts, TrainBatch, TrainState

MetricsLogger = Callable[[int, Mapping[str, float]], None]


class RLCluster:
    """Actor, reference and rollout of one job, as far as they lie on this process's devices.

    The trainer's parameters are the only truth: `sync_weights` moves them to the rollout mesh by the cached transfer
    plan. Under LoRA the frozen base crosses once, at the first sync, and the adapters at every one, or (with
    `rollout.merge_adapters`) the model with them folded in; the reference is the base, not a second copy.

    Attributes:
      model: the actor's configuration.
      rollout_model: what the rollout decodes: the same, without adapters where they are merged.
      state: trainable parameters, optimizer state and step, on the actor's mesh.
      frozen: parameters that are not trained (empty without LoRA).
      trains, generates: whether devices of the actor's and of the rollout's mesh belong to this process. Where it does
        not train, `state` and `frozen` are shapes only.
      tokenizer: shared by all roles.
    """

    def __init__(
        self,
        *,
        actor: Any,
        tokenizer: Tokenizer | str | os.PathLike | None = None,
        cluster_config: ClusterConfig,
        critic: Any = None,
        reference: Any = None,
        reward: Any = None,
        perf_config: Any = None,
        lora: LoraConfig | None = None,
        updates_per_step: int = 1,
        seed: int = 0,
        link: PullLink | None = None,
    ):
        """Puts the models on their meshes.

        Args:
          actor: a Hugging Face directory, or what `podrl.models.from_pretrained` returns.
          tokenizer: a Tokenizer or a directory; by default that of the actor's directory.
          cluster_config: meshes, training and rollout configuration.
          critic: a Hugging Face directory or a model; None for a copy of the actor with a value head, made when a
            learner needs one (`make_critic`).
          reward: a Hugging Face directory of a sequence classification model with one label, whose score is one more
            reward (RewardConfig.model_weight); it lives on Role.REWARD's mesh, by default the rollout's.
          reference: None for the actor's initial weights (under LoRA: its base), or a directory.
          lora: adapters to add where `actor` is a directory.
          updates_per_step: optimizer updates of a step (mini-batches x passes), which learning-rate schedules span.
          seed: of everything random in the cluster.
          link: where trainers and rollouts are separate clusters, the weights' way between them; this process then has
            the role the link says, and the other role's mesh is not used.

        Raises:
          ValueError: a role podrl does not have in this form, or settings that do not fit together.
        """
        if perf_config is not None:
            raise ValueError("RLCluster(..., perf_config=...): stage times are in metrics.jsonl under time/ already.")
        self.config, self.seed = cluster_config, seed
        self.actor_mesh = cluster_config.role_to_mesh[Role.ACTOR]
        self.rollout_mesh = cluster_config.role_to_mesh[Role.ROLLOUT]
        self.training_config = cluster_config.training_config
        self._link = link
        self._find_roles()
        actor = self._read_actor(actor, tokenizer, lora)
        self.optimizer = self.training_config.optimizer(updates_per_step=updates_per_step)
        if self.trains:
            params = self._place_actor(actor)
            self.state, self.frozen = init_state(params, self.model, self.optimizer, self.actor_mesh)
        else:
            dtype = self.training_config.param_dtype
            self.state, self.frozen = abstract_state(self.model, self.optimizer, self.actor_mesh, dtype)
        self._reference_source = reference
        self._reference: PyTree | None = None
        self._train_step: Callable | None = None
        self.temperature = cluster_config.rollout().temperature
        self._logprobs = make_logprob_fn(
            self.model, self.actor_mesh, temperature=self.temperature, dtype=self.training_config.dtype
        )
        self._critic_source, self._lora, self._updates_per_step = critic, lora, updates_per_step
        self.critic: Critic | None = None
        if critic is not None:
            self.make_critic()
        self._build_rollout()
        self.reward_source = "" if reward is None else os.fspath(reward)
        self.reward_model = self._make_reward_model() if self.reward_source and self.generates else None
        self._backlog = Backlog()
        self._buffered: dict[str, list[float]] = {}
        self._loggers: list[MetricsLogger] = []

    def _find_roles(self) -> None:
        """Sets what this process does and its part of the rollout mesh."""
        here = jax.process_index()
        self.trains, self.generates = (
            any(d.process_index == here for d in mesh.devices.flat) for mesh in (self.actor_mesh, self.rollout_mesh)
        )
        if self._link is not None:
            self.trains, self.generates = self._link.trains, not self._link.trains
        self._local_rollout_mesh = self.rollout_mesh
        if self.generates:
            self._local_rollout_mesh = local_mesh(self.rollout_mesh, here, key="roles.rollout.mesh")

    def _make_reward_model(self) -> RewardModel:
        mesh = self.config.role_to_mesh.get(Role.REWARD, self.rollout_mesh)
        local = self._local_rollout_mesh
        if mesh != self.rollout_mesh:
            local = local_mesh(mesh, jax.process_index(), key="roles.reward.mesh")
        dtype = self.training_config.dtype
        return RewardModel(self.reward_source, local, self.tokenizer, longest=self.longest, dtype=dtype)

    def _read_actor(self, actor: Any, tokenizer: Any, lora: LoraConfig | None) -> Any:
        """Sets model and tokenizer; returns the loaded actor, or its directory where no device of it is here."""
        if isinstance(actor, str | os.PathLike):
            tokenizer = tokenizer or actor
            if self.trains:
                dtype = jnp.dtype(self.training_config.param_dtype)
                actor = from_pretrained(os.fspath(actor), mesh=self.actor_mesh, dtype=dtype, lora=lora, seed=self.seed)
        if isinstance(actor, str | os.PathLike):
            self.model = dataclasses.replace(read_config(actor), lora=lora or LoraConfig())
        else:
            self.model = actor.config
        if tokenizer is None:
            raise ValueError("RLCluster needs tokenizer=...: the actor is a model object, which carries none.")
        is_path = isinstance(tokenizer, str | os.PathLike)
        self.tokenizer = Tokenizer(tokenizer) if is_path else tokenizer
        check_vocab(self.model, self.tokenizer.vocab_size)
        return actor

    def _place_actor(self, actor: Any) -> PyTree:
        dtype = jnp.dtype(self.training_config.param_dtype)
        abstract = decoder.abstract_params(self.model, self.actor_mesh, dtype)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        # Integer base weights (lora.base_dtype) and their scales keep their dtype.
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, abstract)
        return jax.jit(lambda tree: jax.tree.map(lambda x, t: x.astype(t), tree, dtypes), out_shardings=shardings)(
            jax.device_put(actor.params, shardings)
        )

    def _build_rollout(self) -> None:
        config = self.config.rollout()
        self.rollout_dtype = jnp.dtype(config.data_type or self.training_config.dtype)
        self._merge: Callable[[PyTree, PyTree], PyTree] | None = None
        self.rollout_model, sent, base = self.model, self.state.params, self.frozen
        if config.merge_adapters and self.model.lora.rank:
            self.rollout_model = dataclasses.replace(self.model, lora=LoraConfig())
            sent, base = decoder.abstract_params(self.rollout_model, self.actor_mesh, self.rollout_dtype), {}
            self._merge = lora_lib.merging(self.model, sent)
        target = decoder.abstract_params(self.rollout_model, self.rollout_mesh, self.rollout_dtype)
        trainable, frozen = decoder.split_trainable(target, self.rollout_model)
        self._trained_places = trainable
        self._in_place: PyTree | None = None  # what moved, of the last policy that was made in place
        self._publisher: Any = self._publisher_of("trainable", sent, trainable)
        self._base_publisher: Any = self._publisher_of("base", base, frozen, lasting=True) if base else None
        self._rollout_base: PyTree | None = None if base else {}

    def _publisher_of(self, name: str, source: PyTree, target: PyTree, *, lasting: bool = False) -> Any:
        """What moves a tree of arrays or shapes to the places of `target`, from this process's point of view."""
        if self._link is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
            return Publisher(source, shardings, target_dtype=self.rollout_dtype)
        if self._link.trains:
            return self._link.sender(name, source, self.rollout_dtype, lasting=lasting)
        return self._link.receiver(name, target)

    @functools.cached_property
    def rollout(self) -> Any:
        """The decoding engine's worker, built when it is first used."""
        from podrl.rollout.rollout import RolloutWorker

        config, engine = self.config.rollout(), self.config.rollout_engine
        if self._local_rollout_mesh is not self.rollout_mesh:  # as many lanes per device, whatever the hosts
            share = self.rollout_mesh.shape["data"] // self._local_rollout_mesh.shape["data"]
            config = dataclasses.replace(config, lanes=max(config.lanes // share, 1))
        worker_class = RolloutWorker if isinstance(engine, str) else engine
        return worker_class(
            self.rollout_model,
            self._local_rollout_mesh,
            config,
            pad_id=self.tokenizer.pad_id,
            eos_ids=tuple(config.eos_tokens or self.tokenizer.eos_ids),
            decode=self.tokenizer.decode,
            seed=self.seed,
        )

    # Weights.

    def sync_weights(self, version: int | None = None, *, in_place: bool = False) -> Policy:
        """Moves the trainer's weights to the rollout mesh; under LoRA the adapters, once the base is there.

        Args:
          version: recorded with every token sampled from these weights; by default the optimizer's step.
          in_place: where the last call said so too, the new policy takes the memory of that one, leaf by leaf, and that
            one is gone, even if this call fails: the rollout mesh never has to hold both. The training loop does this.

        Returns:
          The policy on the rollout mesh, its checksums equal to the trainer's.
        """
        version = int(self.state.step) if version is None else version
        if self._base_publisher is not None and self._rollout_base is None:
            self._rollout_base = self._base_publisher.publish(self.frozen if self.trains else None, 0).params
        sent = self.state.params if self.trains else None
        if self._merge is not None and self.trains:
            sent = self._merge(self.state.params, self.frozen)
        old, self._in_place = (self._in_place if in_place else None), None
        if in_place and self.generates:
            old = old or self._blank()
        moved = self._publisher.publish(sent, version, replacing=old)
        if not self.generates:
            return moved
        if in_place:
            self._in_place = moved.params
        return Policy(self._local(decoder.join_trainable(moved.params, self._rollout_base)), version)

    def _blank(self) -> PyTree:
        """What the first policy made in place replaces, so that it compiles the programs of all that follow."""
        places = jax.tree.map(lambda leaf: leaf.sharding, self._trained_places)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._trained_places)  # noqa: E731
        return jax.jit(zeros, out_shardings=places)()

    def _local(self, params: PyTree) -> PyTree:
        """Weights of the rollout mesh as arrays of this process's part of it; nothing is copied."""
        mesh = self._local_rollout_mesh
        if mesh is self.rollout_mesh:
            return params

        def view(x: jax.Array) -> jax.Array:
            sharding = NamedSharding(mesh, x.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
            return jax.make_array_from_single_device_arrays(
                x.shape, sharding, [s.data for s in x.addressable_shards], dtype=x.dtype
            )

        return jax.tree.map(view, params)

    def actor_params(self) -> PyTree:
        """The whole parameter tree of the actor, adapters joined in; no copy."""
        return decoder.join_trainable(self.state.params, self.frozen)

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of `state`."""
        trainable = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state.params
        )
        return abstract_train_state(trainable, self.optimizer, self.actor_mesh)

    # Checkpoints: the critic's state beside the actor's.

    def saved(self) -> TrainState | ActorCriticState:
        """What a checkpoint must hold; shares the arrays."""
        return _with_critic(self.state, self.critic and self.critic.state)

    def abstract_saved(self) -> TrainState | ActorCriticState:
        """Shapes and shardings of `saved()`, for restoring a checkpoint."""
        return _with_critic(self.abstract_state(), self.critic and self.critic.abstract_state())

    def load_saved(self, saved: TrainState | ActorCriticState) -> None:
        """Goes on from what `saved` returned."""
        self.state = TrainState(saved.params, saved.opt_state, saved.step)
        if self.critic is not None:
            assert isinstance(saved, ActorCriticState)
            self.critic.state = saved.critic

    def keep_reference(self) -> None:
        """Fixes the reference policy; call before the first update, and before a checkpoint is restored.

        Under LoRA nothing is copied. Without, the initial weights are copied once.
        """
        if self._reference_source is not None:
            model = from_pretrained(
                self._reference_source, mesh=self.actor_mesh, dtype=jnp.dtype(self.training_config.param_dtype)
            )
            self._reference = model.params
        elif self.frozen:
            self._reference = self.frozen
        else:
            self._reference = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(self.state.params)

    def make_critic(self) -> Critic | None:
        """The critic, made now if there is none; None on a process without devices of its mesh.

        Without a source of its own it is a copy of the actor as it is now, with a head of zeros; under LoRA it shares
        the actor's base and trains adapters of its own.
        """
        if self.critic is None and self.trains:
            source = self._critic_source
            if source is None:
                source = (self.model, self.actor_params())
            elif not isinstance(source, str | os.PathLike):
                source = (source.config, source.params)
            self.critic = Critic(
                source,
                self.config.role_to_mesh.get(Role.CRITIC, self.actor_mesh),
                self.training_config,
                lora=self._lora,
                updates_per_step=self._updates_per_step,
                seed=self.seed,
            )
            check_vocab(self.critic.model, self.tokenizer.vocab_size)
        return self.critic

    # Training.

    def prepare_actor(self, loss: TokenLoss) -> None:
        """Sets the loss that `update_actor` minimises."""
        self._train_step = make_train_step(
            self.model,
            loss,
            self.optimizer,
            self.actor_mesh,
            temperature=self.temperature,
            dtype=self.training_config.dtype,
            param_dtype=self.training_config.param_dtype,
            remat=self.training_config.remat,
            seed=self.seed,
        )

    def put_batch(self, batch: TrainBatch) -> TrainBatch:
        """A packed host batch on the actor's mesh."""
        return put_batch(batch, self.actor_mesh)

    def update_actor(self, batch: TrainBatch) -> dict[str, Any]:
        """One optimizer update on a batch of the actor's mesh; metrics stay on the device."""
        if self._train_step is None:
            raise ValueError("RLCluster.update_actor needs a loss: call prepare_actor(loss) first; learners do.")
        self.state, metrics = self._train_step(self.state, self.frozen, batch)
        self._backlog.add(metrics)
        return metrics

    def update_critic(self, batch: CriticBatch) -> dict[str, Any]:
        """One optimizer update of the critic on a packed host batch; metrics stay on the device."""
        if self.critic is None:
            raise ValueError("There is no critic: call make_critic() first; PPOLearner does.")
        return self.critic.update(batch)

    def actor_logprobs(self, batch: TrainBatch) -> Any:
        """log p of every packed token under the current actor at the sampling temperature (A, B, T), nats."""
        return self._score(self.actor_params(), batch)

    def reference_logprobs(self, batch: TrainBatch) -> Any:
        """The same under the reference policy."""
        if self._reference is None:
            raise ValueError("There is no reference policy: call keep_reference() before training starts.")
        return self._score(self._reference, batch)

    def _score(self, params: PyTree, batch: TrainBatch) -> Any:
        logprob_ABT = self._logprobs(params, batch)
        self._backlog.add(logprob_ABT)
        return logprob_ABT

    def get_actor_per_token_logps(
        self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B T"]:
        """Actor log-probabilities of right-padded sequences in the sample layout, nats; index 0 and padding are 0."""
        return self._sample_logprobs(self.actor_logprobs, tokens_BT, length_B)

    # Before an update the actor is the old policy.
    get_old_per_token_logps = get_actor_per_token_logps

    def get_ref_per_token_logps(
        self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B T"]:
        """Reference log-probabilities of right-padded sequences in the sample layout, nats."""
        return self._sample_logprobs(self.reference_logprobs, tokens_BT, length_B)

    def _sample_logprobs(self, score: Callable, tokens_BT: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        shape = self.pack_shape(len(tokens_BT))
        placement = packing.place(length_B, shape)
        zeros_BT = np.zeros(tokens_BT.shape, np.float32)
        batch = packing.pack(
            placement,
            tokens_BT=tokens_BT,
            mask_BT=zeros_BT,
            advantage_BT=zeros_BT,
            old_logprob_BT=zeros_BT,
            ref_logprob_BT=zeros_BT,
            sampler_logprob_BT=zeros_BT,
        )
        values_ABT = np.asarray(jax.device_get(score(self.put_batch(batch))))
        return packing.unpack(placement, values_ABT, tokens_BT.shape[1])

    def pack_shape(self, sequences: int, group_size: int = 1) -> packing.PackShape:
        """The fixed shape of batches of at most `sequences` samples of this job's longest length.

        Args:
          sequences: of one update.
          group_size: how many of them have the same prompt.
        """
        return self.training_config.pack_shape(
            sequences=sequences,
            max_length=self.longest,
            mesh=self.actor_mesh,
            group_size=group_size,
            max_prompt_length=self.config.rollout().max_prompt_length,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence the rollout can make."""
        rollout = self.config.rollout()
        return rollout.max_prompt_length + rollout.max_tokens_to_generate

    # Generation.

    def warm_up(self, policy: Policy | None = None) -> None:
        """Compiles the rollout's programs before the first step; without a policy, around weights of zero."""
        if policy is None:
            abstract = decoder.abstract_params(self.rollout_model, self._local_rollout_mesh, self.rollout_dtype)
            zeros = jax.jit(
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract),
                out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
            )
            policy = Policy(zeros(), 0)
        self.rollout.warm_up(policy.params)

    def generate(
        self,
        prompts: Prompts | Sequence[str],
        policy: Policy | None = None,
        *,
        apply_chat_template: bool = False,
        mode: Mode = Mode.TRAIN,
        group_size: int = 1,
        step: int = 0,
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """Completions of prompts.

        Args:
          prompts: tokenised, or plain texts.
          policy: what `sync_weights` returned; synchronised now when left out.
          apply_chat_template: wrap each text as a user's turn.
          mode: which rollout configuration gives the sampling settings.
          group_size: samples per prompt.
          step: part of every sample's random key.
          sampling: overrides the configuration's sampling.
        """
        if not isinstance(prompts, Prompts):
            prompts = self._tokenise(prompts, apply_chat_template)
        if sampling is None and mode is Mode.EVAL:
            sampling = self.config.rollout(mode).sampling()
        policy = self.sync_weights() if policy is None else policy
        return self.rollout.generate(policy, prompts, group_size=group_size, step=step, sampling=sampling)

    def _tokenise(self, texts: Sequence[str], apply_chat_template: bool) -> Prompts:
        if apply_chat_template:
            texts = [self.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        rows = [self.tokenizer.encode(text) for text in texts]
        limit = self.config.rollout().max_prompt_length
        longest = max(len(row) for row in rows)
        if longest > limit:
            raise ValueError(f"A prompt has {longest} tokens: rollout.max_prompt_length={limit} must be at least that.")
        tokens_PT = np.full((len(rows), longest), self.tokenizer.pad_id, np.int32)
        for p, row in enumerate(rows):
            tokens_PT[p, : len(row)] = row
        length_P = np.array([len(row) for row in rows], np.int32)
        return Prompts(tokens_PT, length_P, np.arange(len(rows)), list(texts), {}, b"")

    # Metrics.

    def buffer_metrics(self, metrics: Mapping[str, float], mode: Mode = Mode.TRAIN) -> None:
        """Adds values to the next step's record; several values of one name are averaged."""
        prefix = "" if mode is Mode.TRAIN else "eval/"
        for name, value in metrics.items():
            self._buffered.setdefault(prefix + name, []).append(float(value))

    buffer_metrics_async = buffer_metrics

    def take_buffered_metrics(self) -> dict[str, float]:
        """Means of what was buffered since the last call."""
        taken, self._buffered = self._buffered, {}
        return {name: float(np.mean(values)) for name, values in taken.items()}

    def with_external_metrics_logger(self, logger: MetricsLogger) -> "RLCluster":
        """Calls `logger(step, metrics)` with every record; returns the cluster."""
        self._loggers.append(logger)
        return self

    def log_external(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a record to the external loggers."""
        for logger in self._loggers:
            logger(step, metrics)

    def close(self) -> None:
        """Frees the engine's device memory; the models go with the object."""
        self._in_place = None
        if "rollout" in self.__dict__:
            self.rollout.sleep()


def _with_critic(actor: TrainState, critic: TrainState | None) -> TrainState | ActorCriticState:
    if critic is None:
        return actor
    return ActorCriticState(actor.params, actor.opt_state, actor.step, critic)
