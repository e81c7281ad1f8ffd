"""The trainer's programs of a job that learns from answers in data: SFT, DPO, ORPO, KTO, a reward model."""

from typing import Any

import jax.numpy as jnp

from podrl.algorithms.bradley_terry import ScoredRows, weighted_score
from podrl.algorithms.dpo import WeightedRows, weighted_likelihood
from podrl.models import parameters, scalar
from podrl.plan.programs import TRAINER, Program, Setting
from podrl.trainer import state as state_lib
from podrl.trainer.critic import ScoreForward, make_critic_step, make_value_fn
from podrl.trainer.objective import CrossEntropy, SupervisedRows
from podrl.trainer.step import make_logprob_fn, make_train_step


def answer_programs(setting: Setting) -> list[Program]:
    """Lists the update and, except for SFT, the program that scores answers; every micro-batch counts as full."""
    job, model, mesh = setting.job, setting.model, setting.trainer_mesh()
    training, shape = job.trainer, job.pack_shape(mesh)
    optimizer = training.optimizer()
    of: dict[str, Any] = {"dtype": training.dtype, "param_dtype": training.param_dtype, "remat": training.remat}
    if job.kind.scores:
        rows: Any = ScoredRows
        whole = scalar.abstract_params(model, mesh, jnp.dtype(training.param_dtype))
        trainable, frozen = scalar.split_trainable(whole, model)
        state = state_lib.abstract_train_state(trainable, optimizer, mesh)
        frozen = training.place_frozen(frozen, model.lora, mesh)
        whole = scalar.join_trainable(trainable, frozen)
        update: Any = make_critic_step(model, weighted_score, optimizer, mesh, reads=ScoreForward, prefix="actor", **of)
        score: Any = make_value_fn(model, mesh, dtype=training.dtype, reads=ScoreForward)
        scored = "scores"
    else:
        loss, rows = (CrossEntropy(), SupervisedRows) if job.section == "sft" else (weighted_likelihood, WeightedRows)
        state, frozen = state_lib.abstract_state(model, optimizer, mesh, training.param_dtype)
        frozen = training.place_frozen(frozen, model.lora, mesh)
        whole, temperature = parameters.join_trainable(state.params, frozen), job.rollout.temperature
        of["balance_coef"] = training.balance_coef
        update = make_train_step(model, loss, optimizer, mesh, temperature=temperature, **of)
        score = make_logprob_fn(model, mesh, temperature=temperature, dtype=training.dtype)
        scored = "" if job.section == "sft" else "log-probabilities"
    batch = state_lib.abstract_batch(rows, shape, mesh)
    trips = lambda depth: float(shape.micro_batches) if depth == 0 else 1.0  # noqa: E731
    programs = [Program("train step", TRAINER, lambda: update.lower(state, frozen, batch), 1, trips=trips)]
    if scored:
        programs.append(Program(scored, TRAINER, lambda: score.lower(whole, batch.layout()), 1, trips=trips))
    return programs
