"""The trainer's programs of a job, ready to be compiled: updates, log-probabilities of a reference, the critic.

A teacher of on-policy distillation takes the place of the reference. It may have an architecture of its own, or be the
policy itself. A job uses its teacher in one of three ways. The teacher scores the sampled tokens; or it scores, once
per update, the ids that are likeliest under the policy; or the update itself computes the teacher's hidden states.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podrl import offload
from podrl.algorithms.distill import Distillation, IdRows, TaughtRows, TopKRows
from podrl.algorithms.echo import ObservedRows, with_observations
from podrl.algorithms.policy_loss import PolicyLoss, with_old
from podrl.algorithms.policy_rows import PolicyRows
from podrl.algorithms.value_loss import CriticRows, value_loss
from podrl.job.weights import device_bytes
from podrl.learner.settings import AlgorithmConfig, PPOConfig
from podrl.mesh import rules
from podrl.models import moe, parameters, scalar
from podrl.models.attention import BLOCK
from podrl.models.config import ModelConfig
from podrl.plan.hlo import Trips
from podrl.plan.programs import TRAINER, Program, Setting
from podrl.trainer import state as state_lib
from podrl.trainer.critic import make_critic_step, make_value_fn
from podrl.trainer.distill import TeacherParts, teacher_parts
from podrl.trainer.objective import Forward
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import Placement, SharedPrefixes, place
from podrl.trainer.step import make_logprob_fn, make_train_step
from podrl.types import Batch, Layout, PyTree, unrouted

TEACHING = "teacher's log-probabilities of likely ids"
LIKELY, HINTED = "policy's likeliest ids", f"{TEACHING}, after hints"


def training_programs(setting: Setting) -> list[Program]:
    """Lists the trainer's programs, as far as needed: train step, reference and old log-probabilities, critic."""
    actor, held, shared = _actor_programs(setting)
    if not isinstance(setting.job.algo, PPOConfig):
        return actor
    critic, own = _critic_programs(setting)
    add = lambda program, more: dataclasses.replace(program, resident=program.resident + more)  # noqa: E731
    return [*(add(program, own) for program in actor), *(add(program, held - shared) for program in critic)]


def _actor_programs(setting: Setting) -> tuple[list[Program], float, float]:
    """Lists the actor's programs: (programs, bytes per chip of actor and reference, bytes shared with the critic)."""
    job, model, mesh = setting.job, setting.model, setting.trainer_mesh()
    training, algo = job.trainer, job.algo
    optimizer = training.optimizer()
    loss = algo.policy_loss(job.rollout.max_tokens_to_generate)
    old = algo.old_source(job.updates_per_step)
    state, frozen = state_lib.abstract_state(model, optimizer, mesh, training.param_dtype)
    frozen = training.place_frozen(frozen, model.lora, mesh)
    shape = setting.pack_shape(mesh)
    route_bytes = moe.route_bytes(model) if job.rollout.router_replay else 0
    batch = state_lib.abstract_batch(loss.rows, shape, mesh, route_bytes=route_bytes)
    whole = parameters.join_trainable(state.params, frozen)
    waiting, teacher = setting.reference_params(mesh), algo.distillation
    held = waiting
    if training.hosts_reference:
        held = jax.tree.map(lambda x: offload.placed(x, x.sharding.with_memory_kind("device")), waiting)
    joined: Any = with_old(loss, old)
    batch = _with_optional(batch, algo, loss)
    if algo.observed_weight:
        joined = with_observations(joined)
        batch = Batch(ObservedRows(batch.rows, batch.rows.mask_BT, batch.rows.kl_scale), batch.micro_batches)
    how = TeacherParts({})
    if teacher is not None:
        forward = Forward(config=model, temperature=job.rollout.temperature, mesh=mesh, dtype=training.dtype)
        how = teacher_parts(teacher, forward, cast(ModelConfig, setting.reference))
        batch = _with_teacher(batch, teacher, mesh)
    update = make_train_step(
        model,
        joined,
        optimizer,
        mesh,
        temperature=job.rollout.temperature,
        dtype=training.dtype,
        param_dtype=training.param_dtype,
        remat=training.remat,
        balance_coef=training.balance_coef,
        **how.step,
    )
    logprobs: Any = functools.partial(
        make_logprob_fn, mesh=mesh, temperature=job.rollout.temperature, dtype=training.dtype
    )
    reference, moments = device_bytes(waiting), device_bytes(state.opt_state)
    several = setting.teachers()
    weights = [parameters.abstract_params(other, mesh, jnp.dtype(training.param_dtype)) for _, other in several]
    reference += sum(map(device_bytes, weights))
    # Scoring always loops over the filled micro-batches; the update has a loop only if there can be several.
    scored = _training_trips(setting, shape, looped=True)
    passes = job.updates_per_step / algo.num_iterations
    fixed = (frozen, held) if how.whole else frozen
    programs = [
        _update_program("train step", update, (state, fixed, batch), setting, resident=0.0 if how.whole else reference)
    ]
    likely = how.score is not None and job.data.hinted
    scored_apart = teacher is None or teacher.sampled or likely
    if waiting is not None and training.hosts_reference:
        copy = lambda: cast(Any, offload.copier(waiting)).lower(waiting)  # noqa: E731
        copies = passes if scored_apart else job.updates_per_step
        programs.append(Program("copy of the reference", TRAINER, copy, copies, resident=device_bytes((state, frozen))))
    if setting.reference is not None and scored_apart:
        compared = logprobs(setting.reference)
        trained, scorer_params = device_bytes(state.params), frozen if held is None else held
        own = trained + (device_bytes(frozen) if held is not None else 0.0)
        if teacher is not None and teacher.teacher == "current":
            scorer_params, own = whole, 0.0
        elif teacher is not None and teacher.teacher == "ema":
            scorer_params, own = parameters.join_trainable(held, frozen), trained
        read = batch
        if job.data.hinted:  # a hint makes the teacher's prompts longer
            longer = setting.pack_shape(mesh, more=algo.teacher_hint_tokens)
            read = state_lib.abstract_batch(loss.rows, longer, mesh)
        lower, name = lambda: compared.lower(scorer_params, unrouted(_layout(read))), "reference log-probabilities"
        if likely:
            likely_ids, of_ids = cast(Any, how.likely), cast(Any, how.score_ids)
            first = lambda: likely_ids.lower(whole, _layout(batch))  # noqa: E731
            programs.append(Program(LIKELY, TRAINER, first, passes, resident=moments + reference, trips=scored))
            id_rows = IdRows(unrouted(_layout(read)).rows, _columns(read, cast(Distillation, teacher), mesh)[0])
            lower, name = lambda: of_ids.lower(scorer_params, Batch(id_rows, read.micro_batches)), HINTED
        programs.append(Program(name, TRAINER, lower, passes, resident=moments + own, trips=scored))
    longer = setting.pack_shape(mesh, more=algo.teacher_hint_tokens) if several else shape
    for (path, other), params in zip(several, weights, strict=True):
        score = logprobs(other)
        rows = state_lib.abstract_batch(loss.rows, longer, mesh)
        lower = lambda score=score, params=params, rows=rows: score.lower(params, unrouted(_layout(rows)))  # noqa: E731
        resident = moments + device_bytes(whole) + reference - device_bytes(params)
        name = f"log-probabilities of {path}"
        programs.append(Program(name, TRAINER, lower, passes, resident=resident, trips=scored))
    if how.score is not None and not likely:
        teach = cast(Any, how.score)
        lower = lambda: teach.lower(whole, held, _layout(batch))  # noqa: E731
        programs.append(Program(TEACHING, TRAINER, lower, job.updates_per_step, resident=moments, trips=scored))
    if old == "trainer":
        score = logprobs(model)
        lower = lambda: score.lower(whole, _layout(batch))  # noqa: E731
        programs.append(
            Program("old log-probabilities", TRAINER, lower, passes, resident=moments + reference, trips=scored)
        )
    base = device_bytes(frozen)
    return programs, device_bytes(state) + base + reference, 0.0 if job.model.critic else base


def _layout(batch: Batch[Any]) -> Batch[Layout]:
    """Selects the part of a batch that scoring reads."""
    return Batch(batch.rows.layout, batch.micro_batches)


def _with_optional(batch: Batch[PolicyRows], algo: AlgorithmConfig, loss: PolicyLoss) -> Batch[PolicyRows]:
    """Adds to a batch the optional arrays that the loss reads, and the arrays for sources with their own settings."""
    rows = batch.rows
    like = {rows.mask_BT.dtype: rows.mask_BT, rows.layout.segment_BT.dtype: rows.layout.segment_BT}
    columns: Any = {name: like[jnp.dtype(dtype)] for name, dtype in loss.reads(mixed=len(algo.parts) > 1).items()}
    return Batch(dataclasses.replace(rows, **columns), batch.micro_batches)


def _with_teacher(batch: Batch[Any], teacher: Distillation, mesh: Mesh) -> Batch[Any]:
    """Adds to a packed batch, as shapes, the arrays from a teacher that the update reads besides its weights."""
    rows, alone = batch.rows, batch.rows.alone
    if teacher.sampled:
        return batch
    if teacher.kl == "full":
        return Batch(TaughtRows(rows, alone.mask_BT, alone.kl_scale), batch.micro_batches)
    ids, values = _columns(batch, teacher, mesh)
    columns: Any = {"id_BTK": ids, "teacher_logprob_BTK": values}
    return Batch(TopKRows(rows, alone.mask_BT, alone.kl_scale, **columns), batch.micro_batches)


def _columns(batch: Batch[Any], teacher: Distillation, mesh: Mesh) -> tuple[Any, Any]:
    """Returns the shapes of K ids and of K numbers for each token of a packed batch."""
    dims = (*batch.rows.layout.tokens_BT.shape, teacher.top_k)
    place = rules.sharding_for(("layers", "batch", "time", "act"), dims, mesh)
    ids, values = (jax.ShapeDtypeStruct(dims, dtype, sharding=place) for dtype in (jnp.int32, jnp.float32))
    return ids, values


def _critic_programs(setting: Setting) -> tuple[list[Program], float]:
    """Lists the critic's update and scoring, on the actor's mesh: (programs, bytes per chip that the critic adds)."""
    job, mesh = setting.job, setting.trainer_mesh()
    training, algo = job.trainer, cast(PPOConfig, job.algo)
    model = cast(ModelConfig, setting.critic)
    optimizer = training.critic()
    params = scalar.abstract_params(model, mesh, jnp.dtype(training.param_dtype))
    trainable, frozen = scalar.split_trainable(params, model)
    frozen = training.place_frozen(frozen, model.lora, mesh)
    params = scalar.join_trainable(trainable, frozen)
    state = state_lib.abstract_train_state(trainable, optimizer, mesh)
    policy = algo.policy_loss(job.rollout.max_tokens_to_generate).settings
    loss = functools.partial(
        value_loss, clip_range=algo.clip_range_value, mode=policy.mode, scale=policy.loss_agg_scale or 1.0
    )
    update = make_critic_step(
        model,
        loss,
        optimizer,
        mesh,
        dtype=training.dtype,
        param_dtype=training.param_dtype,
        remat=training.remat,
    )
    score = make_value_fn(model, mesh, dtype=training.dtype)
    shape = setting.pack_shape(mesh)
    batch = state_lib.abstract_batch(CriticRows, shape, mesh)
    programs = [
        _update_program("critic step", update, (state, frozen, batch), setting),
        Program(
            "values",
            TRAINER,
            lambda: score.lower(params, batch.layout()),  # pyright: ignore[reportFunctionMemberAccess]
            job.updates_per_step / algo.num_iterations,
            resident=device_bytes(state.opt_state),
            trips=_training_trips(setting, shape, looped=True),
        ),
    ]
    return programs, device_bytes(state) + (device_bytes(frozen) if job.model.critic else 0.0)


def _update_program(
    name: str, update: Any, args: tuple[PyTree, ...], setting: Setting, *, resident: float = 0.0
) -> Program:
    """Makes the program of an update, which loops over micro-batches if there can be several."""
    shape = setting.job.pack_shape(setting.trainer_mesh())
    trips = _training_trips(setting, shape, looped=shape.micro_batches > 1)
    return Program(
        name, TRAINER, lambda: update.lower(*args), setting.job.updates_per_step, resident=resident, trips=trips
    )


def _planned(setting: Setting, shape: PackShape) -> Placement:
    """Packs an update's planned samples into rows of a shape."""
    job, prompt = setting.job, setting.job.rollout.max_prompt_length
    group_B = np.arange(job.mini_batch_size) // job.group_size
    length_B = np.full_like(group_B, prompt + setting.completion)
    return place(length_B, shape, SharedPrefixes(group_B, np.full_like(group_B, max(prompt - 1, 0))))


def planned_rows(setting: Setting) -> int:
    """Counts the rows that an update's planned samples fill at least in part; empty rows do not count."""
    placed = _planned(setting, setting.job.pack_shape(setting.trainer_mesh()))
    return len(set(zip(placed.micro_B.tolist(), placed.row_B.tolist(), strict=True)))


def filled_micro_batches(setting: Setting) -> int:
    """Counts the micro-batches that an update's planned samples fill."""
    return _planned(setting, setting.job.pack_shape(setting.trainer_mesh())).micro_batches


def _training_trips(setting: Setting, shape: PackShape, *, looped: bool) -> Trips:
    """Makes trip counts: filled micro-batches in the outer loop, half the key blocks of blockwise attention inside."""
    filled = float(_planned(setting, shape).micro_batches)
    blocks = (max(1, shape.tokens // BLOCK) + 1) / 2
    return lambda depth: filled if looped and depth == 0 else blocks
