"""RLTrainingConfig: the settings of a training job's steps, batch splits and optimizer."""

import dataclasses
from typing import Literal

import optax
from jax.sharding import Mesh

from podrl import offload
from podrl.config import Count, Natural, NonNegative, section
from podrl.models.config import LoraConfig
from podrl.trainer.optimizer import AdamSettings, BelowOne, Optimizer, Rate, make_optimizer
from podrl.types import PyTree


@section(
    "trainer",
    {
        "checkpointing_options": "how often and how many is CheckpointConfig(every=..., keep=...), "
        "on the command line --config.checkpoint.every and --config.checkpoint.keep.",
        "metrics_logging_options": "every run writes metrics.jsonl and TensorBoard events under its workdir; "
        "--config.log.to names W&B and MLflow too.",
        "profiler_options": "take a trace with jax.profiler around RLCluster.update_actor.",
        "perf_metrics_options": "every step reports its time split as time/* metrics.",
        "max_inflight_computations": "how far the host runs ahead of the devices is bounded by podrl itself "
        "(podrl/mesh/backlog.py); there is nothing to set.",
        "metrics_prefix": "metric names are fixed: runs are told apart by --workdir, and in W&B by "
        "--config.log.project.",
        "pbar_description": "the bar shows the step and the metrics of the algorithm, on a terminal only; elsewhere a "
        "line is printed every --config.log.console_every steps.",
        "data_sharding_axis": "rows of a batch are always split over the mesh axes ('data', 'expert', 'fsdp'); "
        "choose their sizes in the trainer's mesh.",
        "rollout_micro_batch_size": "it counts prompts; the rollout engine decodes RolloutConfig.lanes samples at a "
        "time, prompts x num_generations, and refills them as samples finish.",
        "compute_logps_micro_batch_size": "log-probabilities are computed on the packed rows of training: "
        "train_micro_batch_size, in prompts too, is for both.",
        "compute_logps_chunk_size": "log-probabilities are always computed by chunks of the vocabulary.",
    },
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RLTrainingConfig(AdamSettings):
    """Settings of the trainer: steps, batch splits and optimizer. The first fields have Tunix's names and defaults.

    AdamSettings has the optimizer's other settings.

    Attributes:
      eval_every_n_steps: number of updates between evaluations. A step trains on one batch of prompts and may make
        several updates; the evaluation comes after the step whose updates reach the next multiple of this number. 0
        evaluates before and after the run only.
      max_steps: number of updates of the run, which ends with the step that reaches this number. None is one pass over
        the data.
      gradient_accumulation_steps: least number of micro-batches of an update in which all sequences have the greatest
        length; updates with shorter sequences may have fewer. The run warns if an update cannot have this number. None
        leaves the split to the other keys.
      checkpoint_root_directory: directory of checkpoints; None is a directory under the workdir. For a learner's
        `train` without `run` it is the whole run directory, and None writes no files.
      max_seq_token_per_tpu: largest number of tokens that one device holds in a micro-batch; at least the length of a
        row, or of the device's part of a row if the mesh has the axis seq.
      actor_optimizer: any optax transformation; None is AdamW with the fields below.
      critic_optimizer: any optax transformation for the critic; None is AdamW with the fields below.
      mini_batch_size: number of prompts per update, each with all of its samples; None is all prompts of a step. The
        number must divide the prompts of a step.
      train_micro_batch_size: number of prompts that a micro-batch must hold, each with all of its samples at their
        greatest length. In jobs that learn from answers in data, the number counts sequences. It never changes a
        gradient.

      micro_batch_sequences: number of sequences of the greatest length that a micro-batch must hold; replaces
        train_micro_batch_size where a micro-batch should hold less than the samples of one prompt.
      max_tokens_per_row: length of a packed row in tokens, a multiple of the mesh's seq. None takes the greatest length
        of a sequence. If this length is at most 256 tokens, None takes 1.65 times the length, so that most pairs of
        sequences fit one row. If sequences can be longer than 256 tokens and prompts are shared, None makes room for as
        many samples of a group as a device can hold. The result is rounded up to a multiple of 32 (CPU) or 128 (other
        devices) for each part along time.
      share_prompts: True if samples of a prompt that lie in one row share the prompt's tokens; None is True. The
        gradient is the same, except that dropout in adapters drops the same inputs of a shared token for all samples.
      param_dtype: storage type of trainable parameters. With bfloat16, podrl's AdamW keeps a float32 master copy.
      dtype: compute dtype; softmax, norms and log-probabilities are float32 in any case.
      remat: values that the backward pass recomputes: 'none'; 'dots', all but the outputs of projections, attention and
        experts, which is fastest, also on CPU; 'full', whole layers; or 'offload', the same values as 'dots', with the
        kept values in the host's memory (this saves device memory on TPU and GPU, and nothing on CPU).
      offload: 'optimizer' keeps AdamW's moments, and its float32 copy of bfloat16 parameters, in the host's memory; an
        update moves them to the devices and back in parts, such as a layer. The arithmetic is the same, though CPUs and
        GPUs may round the last bit in other places. 'reference' keeps the weights of the reference (or of the teacher
        in its place) in the host's memory, and copies them to the devices for each scoring. 'base' keeps the matrices
        of the frozen layers under adapters in the host's memory, and copies a layer's matrices to the devices whenever
        they are used. 'all' moves all of these that the job has; 'none' keeps everything on the devices.
      warmup_fraction: share of all updates over which the learning rate rises.
      critic_learning_rate: peak learning rate of the critic.
      balance_coef: coefficient of the balance loss of the policy's experts (E x sum of f_e P_e, mean over tokens and
        layers). The gradient of the balance loss is added to the gradient of the loss; 0 adds nothing. For a model
        without experts it must be 0.
    """

    eval_every_n_steps: Natural = dataclasses.field(
        metadata={"if_missing": "0 evaluates only before and after training."}
    )
    max_steps: Count | None = None
    gradient_accumulation_steps: Count | None = None
    checkpoint_root_directory: str | None = None
    max_seq_token_per_tpu: Count | None = None
    actor_optimizer: optax.GradientTransformation | None = None
    critic_optimizer: optax.GradientTransformation | None = None
    mini_batch_size: Count | None = None
    train_micro_batch_size: Count | None = None

    micro_batch_sequences: Count | None = None
    max_tokens_per_row: Count | None = None
    share_prompts: bool | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full", "offload"] = "dots"
    offload: Literal["none", "optimizer", "reference", "base", "all"] = "none"
    warmup_fraction: BelowOne = 0.0
    critic_learning_rate: Rate = 1e-5
    balance_coef: NonNegative = 0.0

    def __post_init__(self):
        if self.train_micro_batch_size and self.micro_batch_sequences:
            raise ValueError(
                f"trainer.train_micro_batch_size={self.train_micro_batch_size} counts prompts, "
                f"trainer.micro_batch_sequences={self.micro_batch_sequences} sequences: leave one of the two out."
            )
        if self.hosts_optimizer and (self.actor_optimizer or self.critic_optimizer):
            own = "actor_optimizer" if self.actor_optimizer else "critic_optimizer"
            rest = "reference" if self.hosts_reference else "none"
            raise ValueError(
                f"trainer.offload={self.offload!r} moves the state of podrl's AdamW in parts, and trainer.{own} may "
                f"need its whole state at once: set trainer.offload={rest!r}, or leave trainer.{own} out."
            )
        if self.offload == "base" and self.remat == "none":
            raise ValueError(
                "trainer.offload='base' copies a layer's frozen weights to the devices while they are used, and "
                "trainer.remat='none' keeps the copies of all layers for the backward pass: set trainer.remat='dots' "
                "or 'full'."
            )

    def micro_sequences(self, group_size: int) -> int | None:
        """Number of sequences that a micro-batch must hold; None if no key sets it.

        Args:
          group_size: number of sequences of each prompt.
        """
        return self.micro_batch_sequences or (self.train_micro_batch_size or 0) * group_size or None

    def steps(self, updates_per_step: int) -> int | None:
        """Number of steps of a run whose steps make `updates_per_step` updates each; None if `max_steps` is None."""
        return None if self.max_steps is None else -(-self.max_steps // updates_per_step)

    def optimizer(self) -> Optimizer:
        """Returns the actor's optimizer: `actor_optimizer`, or AdamW with a schedule over `max_steps` updates.

        Raises:
          ValueError: the schedule decays or warms up, and `max_steps` is None; or it decays, and the warm-up takes all
            updates.
        """
        if self.actor_optimizer is not None:
            return Optimizer(self.actor_optimizer)
        return self._placed(make_optimizer(self, **self._span()))

    def critic(self) -> Optimizer:
        """Builds the critic's optimizer: `critic_optimizer`, or AdamW with the actor's fields but its own peak rate."""
        if self.critic_optimizer is not None:
            return Optimizer(self.critic_optimizer)
        settings = dataclasses.replace(self, learning_rate=self.critic_learning_rate)
        return self._placed(make_optimizer(settings, **self._span()))

    @property
    def hosts_optimizer(self) -> bool:
        """True if the optimizer's state waits in the host's memory."""
        return self.offload in ("optimizer", "all")

    @property
    def hosts_reference(self) -> bool:
        """True if the weights of a separate reference model wait in the host's memory."""
        return self.offload in ("reference", "all")

    @property
    def hosts_base(self) -> bool:
        """True if the frozen layers under adapters wait in the host's memory."""
        return self.offload in ("base", "all")

    def place_frozen(self, frozen: PyTree, lora: LoraConfig, mesh: Mesh) -> PyTree:
        """Returns a model's frozen parameters at the place where they are kept: on `mesh`, or on its hosts.

        Args:
          frozen: frozen parameters, as arrays or as abstract arrays with shardings.
          lora: adapters of the model; without adapters the frozen parameters are few, and stay on the devices.
          mesh: mesh of the trainer.

        Raises:
          ValueError: the devices cannot reach the memory of their hosts.
        """
        if not (self.hosts_base and lora.rank):
            return frozen
        return offload.base_on_host(frozen, mesh, f"trainer.offload={self.offload!r}")

    def _placed(self, optimizer: Optimizer) -> Optimizer:
        return dataclasses.replace(optimizer, on_host=self.hosts_optimizer)

    def _span(self) -> dict[str, int]:
        """Returns the keyword arguments of `make_optimizer` that say how many updates warm-up and schedule span."""
        needs_end = self.schedule != "constant" or self.warmup_fraction > 0
        if needs_end and self.max_steps is None:
            raise ValueError(
                f"trainer.schedule={self.schedule!r} with trainer.warmup_fraction={self.warmup_fraction} depends on "
                "the number of updates, which trainer.max_steps=None leaves open: set trainer.max_steps."
            )
        updates = self.max_steps or 0
        return {"warmup_steps": round(self.warmup_fraction * updates), "decay_steps": updates}
