"""RLCluster: the models of a job in their roles, on their meshes; many methods have the names of the library Tunix."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from podrl.algorithms.value_loss import CriticRows
from podrl.cluster.actor import Actor
from podrl.cluster.config import ClusterConfig, Mode, Role
from podrl.cluster.critic import Critic
from podrl.cluster.engines import able
from podrl.cluster.pull_link import PullLink
from podrl.cluster.reward_model import RewardModel
from podrl.cluster.teacher import Teacher
from podrl.cluster.weights import WeightSync
from podrl.cluster.worker import rollout_worker
from podrl.config import Elsewhere, SavedByRun, as_settings, known_arguments, refused_arguments, require
from podrl.data.conversation import prompts_of
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig, Sampling
from podrl.mappings import ChatMessage, Metrics
from podrl.mesh.build import local_mesh
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.moe import check_mesh
from podrl.models.pretrained import Decoder, check_positions, check_vocab, directories_of, on_this_host
from podrl.python_names import speaks_python
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.interface import RolloutEngine
from podrl.rundir.metrics import MetricsLogger, UserMetrics
from podrl.types import Batch, Policy, Prompts, Rollouts, TrainState

_SAMPLES = "give tokens_BT and length_B: each row is a prompt and its completion, padded on the right."
_SCORED = {name: _SAMPLES for name in ("prompt_tokens", "completion_tokens", "pad_id", "eos_id", "completion_mask")}
_SCORED |= {name: _SAMPLES for name in ("segment_ids", "segment_positions")}
_SCORED |= {"temperature": "log-probabilities are at RolloutConfig.temperature."}
_SCORED |= {"micro_batch_size": "RLTrainingConfig.train_micro_batch_size splits them as it does an update."}
_UPDATED = {
    "train_ds": "give one packed batch; learner.train takes a data set.",
    "eval_ds": "learner.train takes it.",
}
_UPDATED |= {"skip_jit": "the update is always compiled; set JAX_DISABLE_JIT=1 to follow it step by step."}
_STEPPED = {"step": "values go into the record of the step that is written next."}


class RLCluster(SavedByRun):
    """The models of one job on the devices of this process: actor, reference, rollout, critic and others.

    Attributes:
      actor: the policy that is trained, with its reference.
      model: configuration of the policy.
      weights: object that moves the actor's weights to the rollout mesh.
      teachers: models that score samples for distillation; empty if this process does not train.
      critic, reward_model: the other models; None if the job has no such model, or if none of its devices belongs to
        this process.
      trains: True if this process has devices of the actor's mesh; if not, `state` and `actor.frozen` are shapes only.
      generates: True if this process has devices of the rollout mesh.
      directories: directory of each model, by its key in the configuration's `model`; '' for a model without one.
      tokenizer: tokenizer of the policy; a teacher and a reward model may have tokenizers of their own.
      metrics: values and loggers that users add to the run's records.
      env_client: client of the environments of all samples, set by `use_environments`; None without environments.
    """

    critic: Critic | None = None
    env_client: EnvironmentClient | None = None

    # Attributes of Tunix's cluster that podrl does not have, and their replacements.
    actor_trainer = Elsewhere("an update is update_actor(batch); weights and optimizer are `state`, the model `actor`.")
    critic_trainer = Elsewhere("an update is update_critic(batch); make_critic() returns the critic.")
    inference_worker = Elsewhere("log-probabilities are get_ref_per_token_logps and get_actor_per_token_logps.")
    get_rewards = Elsewhere("rewards_of(rollouts) of a learner scores samples, also with a reward model.")
    get_values = Elsewhere("PPOLearner computes them with make_critic(), on packed rows.")
    global_steps = Elsewhere("`state.step` counts the updates; metrics.jsonl has every step.")
    perf_v2 = Elsewhere("times are in metrics.jsonl, under time/ and perf/.")
    perf = Elsewhere("times are in metrics.jsonl, under time/ and perf/.")
    r2m = Elsewhere("the meshes are config.role_to_mesh.")

    @speaks_python
    @refused_arguments(
        {
            "roles": "give podrl.ClusterConfig(role_to_mesh={podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}, ...).",
            "model": "give actor=..., a directory, ORG/NAME or a model.",
            "peft_config": "give lora=podrl.LoraConfig(rank=..., alpha=...).",
            "processing_class": "give tokenizer=DIR.",
        }
    )
    @known_arguments
    def __init__(
        self,
        *,
        actor: Any,
        tokenizer: Tokenizer | str | os.PathLike | None = None,
        cluster_config: ClusterConfig,
        critic: Any = None,
        reference: Any = None,
        reward: Any = None,
        perf_config: object = None,
        lora: LoraConfig | Mapping[str, object] | None = None,
        seed: int = 0,
        link: PullLink | None = None,
        teachers: Mapping[Any, Sequence[str]] | None = None,
    ):
        """Puts the models on their meshes.

        Args:
          actor: a Hugging Face directory, the name ORG/NAME of a model on the hub, or the result of
            `podrl.models.from_pretrained`. The other models may also be named by ORG/NAME.
          tokenizer: a Tokenizer, a directory or ORG/NAME; None for the tokenizer in the actor's directory.
          cluster_config: meshes, training and rollout configuration.
          critic: a Hugging Face directory or a model; None for a copy of the actor with a value head, which
            `make_critic` makes when a learner needs it.
          reference: a Hugging Face directory; None for the actor's initial weights, or its base under LoRA.
          reward: a Hugging Face directory of a reward model (sequence classification with one label), whose score is
            added to the rewards with RewardConfig.model_weight; None for no reward model. It is on the mesh of
            Role.REWARD, by default the rollout mesh.
          perf_config: an argument of Tunix, which must be None.
          lora: adapters to add if `actor` is a directory; a LoraConfig, or a dict of its fields.
          seed: seed of all random numbers of the cluster.
          link: connection for the weights if trainers and rollouts are separate clusters; None for one cluster. This
            process trains or generates, as its end of the link says; the mesh of the other role is not used.
          teachers: directory of each teacher -> labels of the sources whose samples it scores; a teacher without labels
            scores all sources that no other teacher scores. Teachers are on the mesh of Role.TEACHER, by default the
            actor's mesh.

        Raises:
          ValueError: an argument is not supported by podrl, or settings do not fit together.
        """
        if perf_config is not None:
            raise ValueError(
                "RLCluster(..., perf_config=...): leave it out; metrics.jsonl has the stages' times under time/."
            )
        config_is_one = isinstance(cluster_config, ClusterConfig)
        require(config_is_one, "RLCluster: cluster_config", cluster_config, "a podrl.ClusterConfig")
        is_path = isinstance(actor, str | os.PathLike)
        require(is_path or hasattr(actor, "config"), "RLCluster: actor", actor, "a directory, ORG/NAME or a model")
        is_path = tokenizer is None or isinstance(tokenizer, str | os.PathLike)
        require(
            is_path or hasattr(tokenizer, "vocab_size"),
            "RLCluster: tokenizer",
            tokenizer,
            "a Tokenizer, a directory, ORG/NAME or None",
        )
        lora = None if lora is None else as_settings(LoraConfig, lora, "lora")
        actor, tokenizer, critic, reward, reference = map(on_this_host, (actor, tokenizer, critic, reward, reference))
        self.config, self.seed, self.training_config = cluster_config, seed, cluster_config.training_config
        self.actor_mesh, self.rollout_mesh = (cluster_config.role_to_mesh[r] for r in (Role.ACTOR, Role.ROLLOUT))
        self.trains, self.generates = cluster_config.roles_of(here := jax.process_index())
        if link is not None:
            self.trains, self.generates = link.trains, not link.trains
        self._local_mesh = self.rollout_mesh  # this process's part of the rollout mesh
        if self.generates:
            self._local_mesh = local_mesh(self.rollout_mesh, here, key="roles.rollout.mesh")
        rollout = cluster_config.rollout()
        self._options: dict[str, Any] = {"lora": lora, "seed": seed}
        on = (self.actor_mesh, self.training_config)
        self.actor = Actor(actor, *on, loaded=self.trains, temperature=rollout.temperature, **self._options)
        if tokenizer is None and not isinstance(actor, str | os.PathLike):
            raise ValueError("RLCluster needs tokenizer=...: the actor is a model object, which has no tokenizer.")
        reads: Any = tokenizer or actor
        self.tokenizer: Tokenizer = Tokenizer(reads) if isinstance(reads, str | os.PathLike) else reads
        self.model = self.actor.model
        for role, mesh in (("trainer", self.actor_mesh), ("rollout", self.rollout_mesh)):
            check_mesh(self.model, mesh, key=f"roles.{role}.mesh")
        check_vocab(self.model, self.tokenizer.vocab_size)
        check_positions(self.model, rollout.max_prompt_length, rollout.longest)
        self._reference_source, self._critic_source = reference, critic
        self.directories = directories_of(path=actor, reference=reference, critic=critic)
        if critic is not None:
            self.make_critic()
        mesh = cluster_config.role_to_mesh.get(Role.TEACHER, self.actor_mesh)
        more = {"temperature": rollout.temperature, "longest": rollout.longest}
        self.teachers = [
            Teacher(on_this_host(path), mesh, self.training_config, self.tokenizer, sources=names, **more)
            for path, names in (teachers or {}).items()
            if self.trains
        ]
        for teacher in self.teachers:
            self._check_own_mesh(Role.TEACHER, teacher.model)
        moves = (self.actor, self.rollout_mesh, self._local_mesh, rollout)
        self.weights = WeightSync(*moves, generates=self.generates, link=link)
        self.reward_source = "" if reward is None else os.fspath(reward)
        self.reward_model: RewardModel | None = None
        if self.reward_source and self.generates:
            mesh, local = cluster_config.role_to_mesh.get(Role.REWARD, self.rollout_mesh), self._local_mesh
            if mesh != self.rollout_mesh:
                local = local_mesh(mesh, here, key="roles.reward.mesh")
            more = {"longest": self.config.longest, "dtype": self.training_config.dtype}
            self.reward_model = RewardModel(self.reward_source, local, self.tokenizer, **more)
            self._check_own_mesh(Role.REWARD, self.reward_model.model)
        self.metrics = UserMetrics()

    @property
    def cluster_config(self) -> ClusterConfig:
        """Returns `config`, under the name that Tunix has for it."""
        return self.config

    def get_rollout_config(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """Returns the rollout configuration of a mode.

        Raises:
          ValueError: the configuration has settings by mode, but none for this mode.
        """
        return self.config.rollout(mode)

    @speaks_python
    def make_critic(self) -> Critic | None:
        """Returns the critic, after making it if there is none; None on a process that does not train.

        If the constructor got no critic, the new critic is a copy of the actor's present weights with a head of zeros.
        Under LoRA it shares the actor's base and has its own adapters.
        """
        if self.critic is None and self.trains:
            source = self._critic_source or Decoder(self.model, self.actor.params(), self.actor_mesh)
            mesh = self.config.role_to_mesh.get(Role.CRITIC, self.actor_mesh)
            self.critic = Critic(source, mesh, self.training_config, **self._options)
            self._check_own_mesh(Role.CRITIC, self.critic.model)
            check_vocab(self.critic.model, self.tokenizer.vocab_size)
        return self.critic

    def _check_own_mesh(self, role: Role, model: ModelConfig) -> None:
        """Checks the mesh of an auxiliary model, unless the model shares the actor's or the rollout mesh.

        On a mesh of its own, only a model with experts may have the axis expert. On a shared mesh, a model without
        experts has a copy at each position of this axis.
        """
        mesh = self.config.role_to_mesh.get(role)
        if mesh not in (None, self.actor_mesh, self.rollout_mesh):
            check_mesh(model, mesh, key=f"roles.{role.value}.mesh")

    # The actor, and its weights.

    @property
    def state(self) -> TrainState:
        """Returns the actor's trainable parameters, optimizer state and step."""
        return self.actor.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.actor.state = state

    def keep_reference(self) -> None:
        """Fixes the reference policy. Call it before the first update, and before a checkpoint is restored."""
        self.actor.keep_reference(self._reference_source, self.tokenizer.vocab_size)

    def sync_weights(self, version: int | None = None, *, in_place: bool = False) -> Policy:
        """Moves the trainer's weights to the rollout mesh.

        Under LoRA the frozen base moves only in the first call. With `rollout.merge_adapters` the whole merged model
        moves in every call.

        Args:
          version: number of the weights, recorded with every token sampled by them; None for the optimizer's step.
          in_place: True to reuse the buffers of the previous policy leaf by leaf, so that the rollout mesh need not
            hold two policies; the training loop does this. Nothing is reused unless the previous call was in place,
            too. The previous policy becomes invalid, even if this call fails.

        Returns:
          The policy on the rollout mesh; its checksums have been compared with the trainer's. A process without devices
          of the rollout mesh gets a policy without weights.
        """
        return self.weights.move(int(self.state.step) if version is None else version, in_place=in_place)

    # Training. `get_*_per_token_logps`, `buffer_metrics` and `with_external_metrics_logger` are Tunix's interface, for
    # training loops of users. podrl's own loop scores packed rows instead, and its recorder writes the records.

    @refused_arguments(_UPDATED)
    def update_actor(self, batch: Batch[Any]) -> Metrics:
        """Makes one optimizer update with a batch on the actor's mesh; returns metrics, which stay on the device.

        Raises:
          ValueError: no learner has prepared the actor with a loss.
        """
        return self.actor.update(batch)

    @refused_arguments(_UPDATED)
    def update_critic(self, batch: Batch[CriticRows]) -> Metrics:
        """Makes one optimizer update of the critic with a packed host batch; returns metrics, which stay on the device.

        Raises:
          ValueError: there is no critic, or no learner has prepared it with a loss.
        """
        if self.critic is None:
            raise ValueError("There is no critic: call make_critic() first; PPOLearner does.")
        return self.critic.update(batch)

    @refused_arguments(_SCORED)
    def get_actor_per_token_logps(
        self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]
    ) -> np.ndarray:
        """Computes log p of each token of right-padded sequences by the actor, nats; 0 at index 0 and on padding."""
        return self.actor.sample_logprobs(tokens_BT, length_B, longest=self.config.longest)

    get_old_per_token_logps = get_actor_per_token_logps  # before an update the actor is the old policy

    @refused_arguments(_SCORED)
    def get_ref_per_token_logps(self, tokens_BT: Int[np.ndarray, "B T"], length_B: Int[np.ndarray, " B"]) -> np.ndarray:
        """Computes log p, nats, of each token of right-padded sequences by the reference; 0 at index 0 and padding."""
        return self.actor.sample_logprobs(tokens_BT, length_B, longest=self.config.longest, reference=True)

    # Generation.

    def use_environments(self, env_client: EnvironmentClient | None) -> None:
        """Sets the client of the environments of all further samples; None for samples without environments."""
        self.env_client = self.rollout.env_client = env_client

    @functools.cached_property
    def rollout(self) -> RolloutEngine:
        """Returns the decoding engine, which is built at the first use."""
        places = (self.rollout_mesh, self._local_mesh)
        return rollout_worker(self.config, self.weights.model, *places, self.tokenizer, seed=self.seed)

    def warm_up(self, policy: Policy | None = None) -> None:
        """Compiles the programs of the decoding engine, and runs them with a policy or, if it is None, zero weights."""
        self.rollout.warm_up((policy or self.weights.blank()).params)

    @speaks_python
    @refused_arguments(
        {
            "micro_batch_size": "samples are decoded in RolloutConfig(lanes=...) lanes, refilled as they end.",
            "trace_tags": "the spans of every step are in spans.jsonl.",
        }
    )
    def generate(
        self,
        prompts: Prompts | Sequence[str | Sequence[ChatMessage]],
        policy: Policy | None = None,
        *,
        apply_chat_template: bool = False,
        mode: Mode = Mode.TRAIN,
        group_size: int = 1,
        step: int = 0,
        sampling: Sampling | None = None,
        ended: Callable[[Any], None] | None = None,
    ) -> Rollouts:
        """Samples completions of prompts.

        Args:
          prompts: tokenised prompts; or texts and conversations, as podrl.data.conversation.prompts_of takes them.
          policy: result of `sync_weights`; None to move the weights now.
          apply_chat_template: True to wrap each text as a user's turn; a conversation always uses the chat template.
          mode: purpose of the samples, which selects the sampling settings of the rollout configuration.
          group_size: number of samples per prompt.
          step: number that is part of every sample's random key.
          sampling: sampling settings to use instead of the configuration's; None for the configuration's.
          ended: function that is called with each sample when it ends, if the engine has the ability 'tells'
            (podrl.engine.config.Ability); None to call nothing.

        Returns:
          The samples, group-major: `p * group_size + g` is sample g of prompt p.
        """
        if not isinstance(prompts, Prompts):
            limit = self.config.rollout().max_prompt_length
            prompts = prompts_of(prompts, self.tokenizer, max_length=limit, chat=apply_chat_template)
        if sampling is None and mode is Mode.EVAL:
            sampling = self.config.rollout(mode).sampling()
        policy = self.sync_weights() if policy is None else policy
        tells = able(self.config.rollout_engine, "tells")
        more: Any = ({"mode": mode.value} if tells or self.env_client else {}) | ({"ended": ended} if tells else {})
        return self.rollout.generate(policy, prompts, group_size=group_size, step=step, sampling=sampling, **more)

    @refused_arguments(_STEPPED)
    def buffer_metrics(self, metrics: Metrics, mode: Mode = Mode.TRAIN) -> None:
        """Adds values by name to the next step's record; several values of one name are averaged.

        If an entry is a pair (value, function), the values are not averaged: the function reduces their list to one.
        """
        self.metrics.add(metrics, prefix="" if mode is Mode.TRAIN else "eval/")

    buffer_metrics_async = buffer_metrics

    def with_external_metrics_logger(self, logger: MetricsLogger) -> "RLCluster":
        """Passes every record from now on to `logger(step, metrics)`; returns the cluster."""
        self.metrics.loggers.append(logger)
        return self

    def close(self) -> None:
        """Frees the engine's device memory; the models are freed with this object."""
        self.weights.release()
        if "rollout" in self.__dict__:
            self.rollout.sleep()
