"""ClusterConfig: the roles of a job's models, the mesh of each role, and the settings of training and rollout."""

import dataclasses
import enum
from collections.abc import Mapping

from jax.sharding import Mesh

from podrl.cluster.engines import ENGINES, check_engine
from podrl.config import require, section
from podrl.engine.config import RolloutConfig, Sampling
from podrl.mesh.build import AXES, with_own_axes
from podrl.trainer.config import RLTrainingConfig
from podrl.workers.child import refuse_inside


class Role(enum.Enum):
    """Roles of models in the cluster."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"
    ROLLOUT = "rollout"
    TEACHER = "teacher"


class Mode(enum.Enum):
    """The purpose of samples, which selects a rollout configuration: training or evaluation."""

    TRAIN = "train"
    EVAL = "eval"


# Fields of RolloutConfig that an evaluation may set for itself, because each request carries these fields to the
# engine, which serves training and evaluation alike.
_EVAL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "max_tokens_to_generate", "return_logprobs")


@section(
    "cluster_config",
    {
        "role_to_logical_axis_rule": "logical axes are mapped to mesh axes in podrl/mesh/rules.py, one table for all.",
        "offload_to_cpu": "RLTrainingConfig(offload='all') keeps the optimizer's state, the reference and the frozen "
        "base in the host's memory; 'optimizer', 'reference' or 'base' keeps one of them there.",
        "roles": "say role_to_mesh={podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}.",
        "rollout_vllm_*": "podrl decodes with its own engine; see RolloutConfig.",
    },
)
@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Settings of the cluster: the mesh of each role, training and generation.

    Attributes:
      role_to_mesh: mesh of every role that is used; two roles with the same mesh are colocated. The reference must
        share the actor's mesh. By default the critic and the teachers use the actor's mesh, and the reward model uses
        the rollout's mesh.
      training_config: steps, optimizer, batch sizes.
      rollout_config: sampling and engine settings; a mapping gives settings for each Mode, training and evaluation. One
        engine samples for both modes, so their settings may differ only in temperature, top_p, top_k, min_p,
        max_tokens_to_generate and return_logprobs. `learner.train(eval_ds=...)` then evaluates with the settings for
        evaluation.
      rollout_engine: the decoding engine: a name in podrl.cluster.engines.ENGINES ('vanilla' and 'podrl' are names of
        podrl's engine), or a class with the methods of podrl.rollout.interface.RolloutEngine. It is not used if
        `rollout_config.engine` names an engine of the user.
    """

    role_to_mesh: Mapping[Role, Mesh]
    training_config: RLTrainingConfig
    rollout_config: RolloutConfig | Mapping[Mode, RolloutConfig]
    rollout_engine: str | type = "vanilla"

    def __post_init__(self):
        refuse_inside()  # refuses worker processes, which must not train, before models are loaded
        roles = self.role_to_mesh
        require(isinstance(roles, Mapping), "role_to_mesh", roles, "a mapping of roles to meshes")
        for role in (Role.ACTOR, Role.ROLLOUT):
            if role not in self.role_to_mesh:
                raise ValueError(f"role_to_mesh has no mesh for {role}: the actor and the rollout both need one.")
        meshes = {role: with_own_axes(mesh) for role, mesh in self.role_to_mesh.items()}
        for role, mesh in meshes.items():
            if mesh is None:
                raise ValueError(
                    f"role_to_mesh gives {role} a mesh with the axes {self.role_to_mesh[role].axis_names}: each axis "
                    f"must be a different one of {AXES} ('dp' is 'data', 'ep' is 'expert', 'tp' and 'model' are "
                    "'tensor'). Make the mesh by podrl.make_mesh('fsdp=4,tensor=2', devices)."
                )
        object.__setattr__(self, "role_to_mesh", meshes)
        reference = self.role_to_mesh.get(Role.REFERENCE, self.role_to_mesh[Role.ACTOR])
        if reference != self.role_to_mesh[Role.ACTOR]:
            raise ValueError(
                "role_to_mesh puts Role.REFERENCE on another mesh than Role.ACTOR: podrl computes reference "
                "log-probabilities on the actor's packed rows, so give both the same mesh."
            )
        trains, generates = (set(self.role_to_mesh[role].devices.flat) for role in (Role.ACTOR, Role.ROLLOUT))
        critic = self.role_to_mesh.get(Role.CRITIC, self.role_to_mesh[Role.ACTOR])
        if set(critic.devices.flat) & (generates - trains):
            raise ValueError(
                "role_to_mesh puts Role.CRITIC on devices of Role.ROLLOUT: the critic learns while samples are made, "
                "so give it the actor's mesh or devices of its own."
            )
        reward = self.role_to_mesh.get(Role.REWARD, self.role_to_mesh[Role.ROLLOUT])
        if reward != self.role_to_mesh[Role.ROLLOUT] and trains & set(reward.devices.flat):
            raise ValueError(
                "role_to_mesh puts Role.REWARD on devices of Role.ACTOR: samples are scored while the actor trains, so "
                "give the reward model the rollout's mesh or devices of its own."
            )
        self._check_modes()
        if (own := self.rollout().engine) not in ENGINES:
            if self.rollout_engine not in (*ENGINES, own):
                raise ValueError(
                    f"rollout_engine={self.rollout_engine!r} and rollout_config.engine={own!r} both name an engine: "
                    "give one of them."
                )
            object.__setattr__(self, "rollout_engine", own)
        check_engine(self.rollout_engine, self.rollout())

    def _check_modes(self) -> None:
        """Refuses a `rollout_config` of a wrong type, and settings of Mode.EVAL that would have no effect."""
        given = self.rollout_config
        if isinstance(given, RolloutConfig):
            return
        require(isinstance(given, Mapping), "rollout_config", given, "a RolloutConfig, or a mapping of modes to them")
        if wrong := [key for key in given if not isinstance(key, Mode)]:
            raise ValueError(f"rollout_config has the key {wrong[0]!r}: its keys must be Mode.TRAIN and Mode.EVAL.")
        for mode, of_mode in given.items():
            require(isinstance(of_mode, RolloutConfig), f"rollout_config[{mode}]", of_mode, "a RolloutConfig")
        train, own = self.rollout(), given.get(Mode.EVAL, self.rollout())
        for field in dataclasses.fields(RolloutConfig):
            ours, theirs = getattr(own, field.name), getattr(train, field.name)
            if ours != theirs and field.name not in _EVAL_FIELDS:
                raise ValueError(
                    f"rollout_config[Mode.EVAL].{field.name}={ours!r} must be {theirs!r}, as for Mode.TRAIN: one "
                    f"engine samples for both modes, so their settings may differ in {', '.join(_EVAL_FIELDS)} only. "
                    "Write dataclasses.replace(train, temperature=...) for Mode.EVAL."
                )
        if own.max_tokens_to_generate > train.max_tokens_to_generate:
            raise ValueError(
                f"rollout_config[Mode.EVAL].max_tokens_to_generate={own.max_tokens_to_generate} is more than in "
                f"Mode.TRAIN, {train.max_tokens_to_generate}: give at most this number, for which caches are made."
            )

    def roles_of(self, process: int) -> tuple[bool, bool]:
        """Returns (trains, generates): whether a process has devices of the actor's mesh, and of the rollout's mesh."""
        trains, generates = (
            any(device.process_index == process for device in self.role_to_mesh[role].devices.flat)
            for role in (Role.ACTOR, Role.ROLLOUT)
        )
        return trains, generates

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest sequence that the rollout can make in training."""
        return self.rollout().longest

    def rollout(self, mode: Mode = Mode.TRAIN) -> RolloutConfig:
        """Returns the rollout configuration of a mode.

        Raises:
          ValueError: `rollout_config` is a mapping without this mode.
        """
        if isinstance(self.rollout_config, RolloutConfig):
            return self.rollout_config
        if mode not in self.rollout_config:
            raise ValueError(f"rollout_config has no entry for {mode}: it has {[m.name for m in self.rollout_config]}.")
        return self.rollout_config[mode]

    def eval_sampling(self) -> Sampling | None:
        """Returns the sampling settings that the configuration gives only for evaluations; None if it gives none."""
        if isinstance(self.rollout_config, RolloutConfig) or Mode.EVAL not in self.rollout_config:
            return None
        return self.rollout(Mode.EVAL).sampling()
