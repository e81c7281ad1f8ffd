"""Jobs that learn from given answers, on the same trainer, loop and checkpoints: supervised fine-tuning and DPO."""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
from jax.sharding import Mesh

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import build, defaults, merge
from podrl.data.pairs import PairStream
from podrl.data.pipeline import DataConfig
from podrl.data.sft import SFTConfig, SFTStream
from podrl.data.tokenizer import Tokenizer
from podrl.learner import describe, job
from podrl.learner.console import make_console, print_table
from podrl.learner.evaluate import EvalConfig
from podrl.learner.loop import Schedule, train
from podrl.learner.placement import Meshes, RolesConfig, meshes
from podrl.learner.run import Run
from podrl.learner.setup import ModelSource
from podrl.learner.supervised import DPOConfig, DPOParts, SFTParts
from podrl.models import decoder
from podrl.models.config import gemma2_config
from podrl.models.pretrained import Decoder
from podrl.rollout.config import RolloutConfig
from podrl.runtime.checkpoint import CheckpointConfig
from podrl.runtime.metrics import LogConfig
from podrl.runtime.roles import ROLLOUT, TRAINER
from podrl.runtime.watchdog import EXIT_DONE
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.packing import PackShape

SCRATCH = "scratch"


@dataclasses.dataclass(frozen=True)
class ScratchModel:
    """A Gemma 2 decoder with random weights; see podrl.models.config.gemma2_config."""

    num_layers: int = 3
    model_dim: int = 128
    ffn_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 64
    max_length: int = 1024


@dataclasses.dataclass(frozen=True)
class SFTJob:
    """Everything `--config` says about a supervised job; of sft and dpo the algorithm reads one.

    Attributes:
      tokenizer: directory of the tokenizer; '' is that of the model ('tiny' with model.path='scratch').
      scratch: the model trained where model.path is 'scratch'.
      Others as in podrl.learner.job.RLJob.
    """

    trainer: RLTrainingConfig
    algorithm: str = "sft"
    seed: int = 0
    fake_devices: int = 0
    compile_cache: str = "auto"
    tokenizer: str = ""
    model: ModelSource = ModelSource()
    scratch: ScratchModel = ScratchModel()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    dpo: DPOConfig = DPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    roles: RolesConfig = RolesConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def answers(self) -> int:
        """Sequences of a batch."""
        return 2 * self.dpo.batch_size if self.algorithm == "dpo" else self.sft.batch_size

    @property
    def longest(self) -> int:
        """Tokens of the longest of them."""
        return self.dpo.max_length if self.algorithm == "dpo" else self.sft.max_length

    def pack_shape(self, mesh: Mesh) -> PackShape:
        """The shape of a packed batch on the trainer's mesh."""
        return self.trainer.pack_shape(sequences=self.answers, max_length=self.longest, mesh=mesh)


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of a supervised job with every key there is."""
    base = defaults(SFTJob)
    del base["sft" if values["algorithm"] == "dpo" else "dpo"]
    # Given answers teach the distribution itself; at another temperature it is that of sampling which learns them.
    return merge(merge(base, {"rollout": {"temperature": 1.0}}), values)


def scratch_model(config: ScratchModel, vocab_size: int, mesh: Mesh, seed: int) -> Decoder:
    """A Gemma 2 decoder with random parameters, made in place on the mesh."""
    model = gemma2_config(vocab_size=vocab_size, **dataclasses.asdict(config))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, decoder.abstract_params(model, mesh, jnp.dtype("float32")))
    make = jax.jit(functools.partial(decoder.init_params, model), out_shardings=shardings)
    return Decoder(model, make(jax.random.key(seed)), mesh)


def parse(values: Mapping[str, Any]) -> SFTJob:
    """The job a configuration describes, its model's directory there.

    Raises:
      ValueError: unknown or missing keys, no such directory, or adapters on a model that has nothing to keep.
    """
    settings = build(SFTJob, values)
    if settings.trainer.max_steps is None:
        raise ValueError("config.trainer lacks max_steps: set --config.trainer.max_steps=...")
    if settings.model.path != SCRATCH:
        _ = settings.model.directory
    elif settings.model.lora.rank:
        raise ValueError(
            f"model.lora.rank={settings.model.lora.rank} with model.path={SCRATCH!r}: adapters on random weights that "
            "stay as they are learn nothing of use. Set model.lora.rank=0, or give model.path=DIR."
        )
    roles = settings.roles
    if (roles.critic.mesh, roles.reward.mesh) != (TRAINER, ROLLOUT):
        raise ValueError(
            f"roles.critic.mesh={roles.critic.mesh!r}, roles.reward.mesh={roles.reward.mesh!r}: supervised training "
            f"has neither model, so leave them at {TRAINER!r} and {ROLLOUT!r}."
        )
    return settings


def dry_run(values: Mapping[str, Any], workdir: str) -> int:
    """Prints the resolved configuration, the role table and the batch arithmetic of a supervised job."""
    settings, console = parse(values), make_console()
    console.print(json.dumps(dataclasses.asdict(settings), indent=2, default=str), markup=False)
    print_plan(console, settings, meshes(settings.roles), workdir)
    return EXIT_DONE


def print_plan(console: rich.console.Console, settings: SFTJob, on: Meshes, workdir: str) -> None:
    """The tables a run starts with, and all that a dry run prints after the configuration."""
    describe.print_roles(console, on)
    section, steps, shape = settings.algorithm, settings.trainer.max_steps or 0, settings.pack_shape(on.trainer)
    batch = settings.dpo.batch_size if section == "dpo" else settings.sft.batch_size
    what = "pairs" if section == "dpo" else "examples"
    rows = [
        [f"{what} per step", f"{batch}", f"{section}.batch_size"],
        ["updates per step", "1", f"all {what} of the step"],
        ["micro-batches per update", f"at most {shape.micro_batches}", f"{shape.rows} rows of {shape.tokens} tokens"],
        ["longest example", f"{settings.longest} tokens", f"{section}.max_length"],
        ["steps", f"{steps}", "trainer.max_steps"],
        [f"{what} in all", f"{steps * batch:,}", f"steps x {what} per step"],
    ]
    print_table(console, "Batch arithmetic", ["what", "number", "from"], rows)
    rank = settings.model.lora.rank
    trained = f"adapters of rank {rank}" if rank else "all parameters"
    formula = _formula(settings)
    console.print(f"Algorithm {section}: {formula}; trains {trained} of {settings.model.path}.", markup=False)
    console.print(f"Run directory: {workdir}\n")


def _formula(settings: SFTJob) -> str:
    if settings.algorithm == "sft":
        return "mean of -log p over the learned tokens"
    dpo, s = settings.dpo, settings.dpo.label_smoothing
    turned = f" - {s:g} log sigmoid(-m)" if s else ""
    weight = f"{1 - s:g} " if s else ""
    return (
        f"mean over pairs of -{weight}log sigmoid(m){turned}, m = {dpo.beta:g} (log p / p_ref of the chosen answer - "
        "that of the rejected)"
    )


def run(values: Mapping[str, Any], workdir: str, *, command: str) -> int:
    """Trains the supervised job a configuration describes; returns the exit code. Arguments as in job.run."""
    settings = parse(values)
    assert settings.trainer.max_steps is not None, "parse refuses that"
    started = time.monotonic()
    on = meshes(settings.roles)
    with Run(workdir, log=settings.log, checkpoint=settings.checkpoint, config=dataclasses.asdict(settings)) as current:
        print_plan(current.console, settings, on, workdir)
        with current.watchdog.stage("start-up"):
            cluster = _cluster(settings, on)
            stream = _stream(settings, cluster.tokenizer)
        evaluator = job.make_evaluator(cluster, settings.data, settings.eval, settings.rollout.max_prompt_length)
        schedule = Schedule(
            max_steps=settings.trainer.max_steps,
            save_every=settings.checkpoint.every,
            eval_every=settings.trainer.eval_every_n_steps,
        )
        given = (cluster, stream, current, schedule, evaluator, settings.pack_shape(on.trainer))
        parts = DPOParts(settings.dpo, *given) if settings.algorithm == "dpo" else SFTParts(*given)
        try:
            step = train(parts, schedule)
        finally:
            parts.close()
        facts = {
            "seed": settings.seed,
            "devices": describe.device_line(),
            "wall_s": round(time.monotonic() - started, 1),
        }
        return job.finish(current, step, settings.trainer.max_steps, facts, command)


def _stream(settings: SFTJob, tokenizer: Tokenizer) -> SFTStream | PairStream:
    if settings.algorithm == "sft":
        return SFTStream(settings.data, settings.sft, tokenizer)
    dpo = settings.dpo
    return PairStream(settings.data, tokenizer, pairs=dpo.batch_size, max_length=dpo.max_length)


def _cluster(settings: SFTJob, on: Meshes) -> RLCluster:
    roles = {Role.ACTOR: on.trainer, Role.ROLLOUT: on.rollout}
    config = ClusterConfig(role_to_mesh=roles, training_config=settings.trainer, rollout_config=settings.rollout)
    scratch = settings.model.path == SCRATCH
    directory = settings.tokenizer or ModelSource("tiny" if scratch else settings.model.path).directory
    tokenizer = Tokenizer(directory)
    actor: Any
    if scratch:
        actor = scratch_model(settings.scratch, tokenizer.vocab_size, on.trainer, settings.seed)
    else:
        actor = settings.model.directory
    return RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=config,
        reference=settings.model.reference or None,
        lora=settings.model.lora,
        seed=settings.seed,
    )
