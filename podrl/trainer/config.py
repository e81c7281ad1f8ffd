"""RLTrainingConfig: how a training job steps, splits its batches and optimises."""

import dataclasses
from typing import Literal

import optax
from jax.sharding import Mesh

from podrl.config import refuses
from podrl.trainer.optimizer import Moment, Optimizer, OptimizerConfig, make_optimizer
from podrl.trainer.packing import PackShape
from podrl.trainer.state import batch_shards

# Where no key says otherwise, tokens of one micro-batch on one device, and what row lengths are multiples of. On CPU
# small micro-batches stay near the caches and leave fewer empty rows; accelerators must fill their matrix units.
_DEVICE_TOKENS = {"cpu": 1280, "accelerator": 4096}
_ROW_MULTIPLE = {"cpu": 32, "accelerator": 128}
_SHORT = 256
# Batches that share prompts have fewer tokens, of which the last micro-batch should not leave many rows empty.
_SHARING_TOKENS = 480


@refuses(
    {
        "checkpointing_options": "how often and how many is CheckpointConfig(every=..., keep=...), "
        "on the command line --config.checkpoint.every and --config.checkpoint.keep.",
        "metrics_logging_options": "every run writes metrics.jsonl and TensorBoard events under its workdir; "
        "W&B is switched on with --config.log.wandb.",
        "profiler_options": "take a trace with jax.profiler around RLCluster.update_actor.",
        "perf_metrics_options": "every step reports its time split as perf/* metrics.",
        "data_sharding_axis": "rows of a batch are always split over the mesh axes ('data', 'fsdp'); "
        "choose their sizes in the trainer's mesh.",
        "rollout_micro_batch_size": "the rollout engine decodes RolloutConfig.lanes samples at a time and refills "
        "them as samples finish.",
        "compute_logps_micro_batch_size": "log-probabilities are computed on the packed rows of training; "
        "max_seq_token_per_tpu bounds both.",
    }
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RLTrainingConfig:
    """Steps, batch splits and optimizer of the trainer. The first group has Tunix's names and defaults.

    Attributes:
      eval_every_n_steps: steps between evaluations; 0 evaluates before and after only.
      max_steps: steps of the run; None is one pass over the data.
      gradient_accumulation_steps: micro-batches an update is split into at least; None leaves it to the other keys.
      checkpoint_root_directory: where checkpoints go; None is under the workdir.
      max_inflight_computations: steps the host may be ahead of the device.
      metrics_prefix: put before every metric's name, with a '/'.
      pbar_description: shown by the progress bar; None hides the bar.
      max_seq_token_per_tpu: tokens one device holds in a micro-batch; at least one row.
      actor_optimizer: any optax transformation; None is AdamW from the fields below.
      critic_optimizer: the same for the critic.
      mini_batch_size: sequences per update; None is all of the step's. Must divide them.
      train_micro_batch_size: sequences of the longest kind that a micro-batch must hold.

      max_tokens_per_row: length of a packed row; None is the longest sequence, rounded up to a multiple of 32 (CPU) or
        128, or 1.65 times that where sequences are short (up to 256 tokens), so that two of most share a row; where
        prompts are shared and sequences are not short, as much of a group as a device takes.
      share_prompts: whether samples of a prompt that lie in one row share its tokens; None does so but on TPU, whose
        attention kernel cannot express it (True takes XLA's attention there). The gradient is the same, but that
        adapters drop the same inputs of a shared token for all its samples.
      param_dtype: how trainable parameters are stored. bfloat16 keeps a float32 master copy in the optimizer.
      dtype: compute dtype; softmax, norms and log-probabilities are float32 whatever it is.
      remat: what the backward pass recomputes: 'none', 'dots' (all but projections and attention; the
        fastest on CPU too), 'full' (whole layers) or 'offload' (as 'dots', but what is kept waits in the host's memory;
        TPU and GPU gain memory by it, on CPU it is the same memory).
      learning_rate, schedule, end_fraction, b1, b2, eps, weight_decay, max_grad_norm, mu_dtype, nu_dtype: see
        OptimizerConfig.
      warmup_fraction: share of all updates over which the learning rate rises.
      critic_learning_rate: peak rate of the critic.
    """

    eval_every_n_steps: int
    max_steps: int | None = None
    gradient_accumulation_steps: int | None = None
    checkpoint_root_directory: str | None = None
    max_inflight_computations: int = 2
    metrics_prefix: str = ""
    pbar_description: str | None = "Training"
    max_seq_token_per_tpu: int | None = None
    actor_optimizer: optax.GradientTransformation | None = None
    critic_optimizer: optax.GradientTransformation | None = None
    mini_batch_size: int | None = None
    train_micro_batch_size: int | None = None

    max_tokens_per_row: int | None = None
    share_prompts: bool | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full", "offload"] = "dots"
    learning_rate: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_fraction: float = 0.0
    end_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    mu_dtype: Moment = "float32"
    nu_dtype: Moment = "float32"
    critic_learning_rate: float = 1e-5

    def __post_init__(self):
        for name in (
            "max_steps",
            "gradient_accumulation_steps",
            "max_inflight_computations",
            "max_seq_token_per_tpu",
            "mini_batch_size",
            "train_micro_batch_size",
            "max_tokens_per_row",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"trainer.{name}={value} must be at least 1, or None.")
        if self.eval_every_n_steps < 0:
            raise ValueError(f"trainer.eval_every_n_steps={self.eval_every_n_steps} must be at least 0 (0 is off).")
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"trainer.warmup_fraction={self.warmup_fraction} must lie in [0, 1).")
        mini, micro, count = self.mini_batch_size, self.train_micro_batch_size, self.gradient_accumulation_steps
        if mini is not None and micro is not None and count is not None and mini != micro * count:
            raise ValueError(
                f"trainer.mini_batch_size={mini} is not trainer.train_micro_batch_size={micro} x "
                f"trainer.gradient_accumulation_steps={count}: leave one of the three out."
            )

    def optimizer(self, *, updates_per_step: int = 1, max_steps: int | None = None) -> Optimizer:
        """The actor's optimizer; schedules span max_steps x updates_per_step updates.

        Args:
          updates_per_step: mini-batches x passes over them (grpo.num_iterations).
          max_steps: steps of the run where the field is None.

        Raises:
          ValueError: a schedule that decays, and no number of steps.
        """
        if self.actor_optimizer is not None:
            return Optimizer(self.actor_optimizer)
        return make_optimizer(self._adamw(self.learning_rate, updates_per_step, max_steps))

    def critic(self, *, updates_per_step: int = 1, max_steps: int | None = None) -> Optimizer:
        """The critic's optimizer: the actor's fields at `critic_learning_rate`."""
        if self.critic_optimizer is not None:
            return Optimizer(self.critic_optimizer)
        return make_optimizer(self._adamw(self.critic_learning_rate, updates_per_step, max_steps))

    def pack_shape(
        self, *, sequences: int, max_length: int, mesh: Mesh, group_size: int = 1, max_prompt_length: int = 0
    ) -> PackShape:
        """The shape of every packed batch of `sequences` sequences (one mini-batch) of at most `max_length` tokens.

        Args:
          sequences, max_length: what a batch must hold.
          mesh: where it is trained on.
          group_size: sequences that begin with the same prompt.
          max_prompt_length: tokens of the longest prompt.

        Raises:
          ValueError: rows that cannot hold the longest sequence, or a device limit that cannot hold a row.
        """
        platform = mesh.devices.flat[0].platform
        kind = "cpu" if platform == "cpu" else "accelerator"
        limit, multiple = self.max_seq_token_per_tpu, _ROW_MULTIPLE[kind]
        wanted = max_length if max_length > _SHORT else int(1.65 * max_length)
        share = platform != "tpu" if self.share_prompts is None else self.share_prompts
        shared = share and group_size > 1 and max_prompt_length > 1
        if shared and max_length > _SHORT:
            # A prompt and as many of the longest completions as a device takes, each with its own last prompt token.
            own, room = max_length - max_prompt_length + 1, (limit or _DEVICE_TOKENS[kind]) // multiple * multiple
            fit = min(group_size, (room - max_prompt_length) // own)
            wanted = max_prompt_length + fit * own if fit > 1 else wanted
        tokens = self.max_tokens_per_row or -(-wanted // multiple) * multiple
        shards = batch_shards(mesh)
        if limit is not None and limit < tokens:
            raise ValueError(
                f"trainer.max_seq_token_per_tpu={limit} cannot hold a packed row of {tokens} tokens: raise it, or "
                "lower trainer.max_tokens_per_row."
            )
        full = _SHARING_TOKENS if shared and kind == "cpu" else _DEVICE_TOKENS[kind]
        per_device = max(1, (limit or full) // tokens)
        micro = self.train_micro_batch_size
        if micro is None and self.gradient_accumulation_steps is not None:
            micro = -(-sequences // self.gradient_accumulation_steps)
        rows = per_device * shards
        if micro is not None and max_length <= tokens:
            # Rows that are longer for the sake of sharing are fewer: the memory is that of `micro` sequences.
            rows = -(-micro * max_length // tokens) if shared else -(-micro // (tokens // max_length))
            if limit is not None:
                rows = min(rows, per_device * shards)
        return PackShape.for_worst_case(
            sequences,
            max_length,
            max_tokens_per_row=tokens,
            rows_per_micro_batch=rows,
            shards=shards,
            shared=shared,
        )

    def _adamw(self, peak: float, updates_per_step: int, max_steps: int | None) -> OptimizerConfig:
        steps = self.max_steps or max_steps
        needs_end = self.schedule != "constant" or self.warmup_fraction > 0
        if needs_end and steps is None:
            raise ValueError(
                f"trainer.schedule={self.schedule!r} with trainer.warmup_fraction={self.warmup_fraction} needs the "
                "number of steps: set trainer.max_steps."
            )
        updates = (steps or 0) * updates_per_step
        return OptimizerConfig(
            learning_rate=peak,
            schedule=self.schedule,
            warmup_steps=round(self.warmup_fraction * updates),
            decay_steps=updates,
            end_fraction=self.end_fraction,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            mu_dtype=self.mu_dtype,
            nu_dtype=self.nu_dtype,
        )
