"""Lower bounds of the memory and time of a side of a job (bytes per chip, seconds per step), without compiling."""

import jax.numpy as jnp

from podrl.job.weights import device_bytes
from podrl.mesh.rules import batch_shards, time_shards
from podrl.models import moe, parameters
from podrl.models.config import ModelConfig
from podrl.plan.programs import ROLLOUT, Setting
from podrl.plan.training import HINTED, LIKELY, TEACHING, filled_micro_batches, training_programs
from podrl.trainer import state as state_lib


def least_bytes(side: str, setting: Setting) -> float:
    """Counts a lower bound of the bytes that a side needs on each chip.

    The trainer needs parameters, moments, the parameters of a reference or a teacher, and the activations that the
    backward pass keeps of every layer: the layer's input and, unless `trainer.remat` is 'full' or 'offload', the
    projections of attention and feed-forward (not those of experts that are spread over devices). It also needs the
    per-layer embeddings. The rollout needs the weights.
    """
    if side == ROLLOUT:
        mesh = setting.rollout_mesh()
        return device_bytes(parameters.abstract_params(setting.rollout_model, mesh, setting.rollout_dtype()))
    training, model, mesh = setting.job.trainer, setting.model, setting.trainer_mesh()
    state, frozen = state_lib.abstract_state(model, training.optimizer(), mesh, training.param_dtype)
    shape, tensor = setting.job.pack_shape(mesh), mesh.shape["tensor"]
    tokens = shape.rows * shape.tokens / batch_shards(mesh) / time_shards(mesh)
    kept = 0.0
    for alike in model.alike():
        width = alike.model_dim + alike.ple_dim
        if training.remat in ("none", "dots"):
            heads = alike.num_heads + (0 if alike.reuses_keys else 2 * alike.num_kv_heads)
            mixed = heads * alike.head_dim
            if (linear := alike.delta) is not None:
                mixed = linear.channels + linear.outputs
            inner, experts = alike.active_ffn_dim, alike.experts
            if experts is not None and moe.spread_over(experts, mesh):
                inner -= experts.chosen * experts.ffn_dim
            width += (mixed + 2 * inner) / tensor
        kept += alike.num_layers * width
    activations = tokens * kept * jnp.dtype(training.dtype).itemsize
    return device_bytes((state, frozen, setting.reference_params(mesh))) + activations


def _forward(model: ModelConfig) -> float:
    """Counts operations per token of a model's projections."""
    work = 0.0
    for alike in model.alike():
        keys = 0 if alike.reuses_keys else alike.num_kv_heads * (1 if alike.key_is_value else 2)
        heads = alike.num_heads * (3 if alike.gated_attention else 2) + keys
        weights = alike.model_dim * alike.head_dim * heads
        if (linear := alike.delta) is not None:
            weights = alike.model_dim * (linear.channels + 2 * (linear.outputs + linear.value_heads))
        work += 2.0 * alike.num_layers * (weights + 3 * (alike.active_ffn_dim + alike.ple_dim) * alike.model_dim)
    return work


def least_trainer_seconds(setting: Setting) -> float:
    """Counts the least seconds that the matrix products of the trainer's layers take, at the chip's peak.

    All tokens of the rows of filled micro-batches count. For each weight of the layers' projections a token takes 2
    operations in the forward pass and 4 in the backward pass. With LoRA the backward pass takes 2, which are for the
    gradients of activations, and the first layer needs none. With remat='full' the forward operations are repeated,
    except in the last projection of a layer, whose output no gradient reads. Attention, embeddings and the critic are
    not counted.
    """
    model, mesh, training = setting.model, setting.trainer_mesh(), setting.job.trainer
    shape = setting.job.pack_shape(mesh)
    forward, compared = _forward(model), _forward(setting.reference or model)
    backward = 2 * forward if not model.lora.rank else forward * (model.num_layers - 1) / model.num_layers
    last = sum(2.0 * alike.active_ffn_dim * model.model_dim * alike.num_layers for alike in model.alike())
    again = forward - last if training.remat == "full" and model.num_layers > 1 else 0.0
    teacher = setting.job.algo.distillation
    within = compared if teacher is not None and teacher.kl == "full" else 0.0
    work = {
        "train step": forward + backward + again + within,
        "reference log-probabilities": compared,
        TEACHING: forward + compared,
        LIKELY: forward,
        HINTED: compared,
        "old log-probabilities": forward,
    }
    runs = sum(program.runs * work.get(program.name, 0.0) for program in training_programs(setting))
    chips = batch_shards(mesh) * time_shards(mesh) * mesh.shape["tensor"]
    tokens = filled_micro_batches(setting) * shape.rows * shape.tokens / chips
    return runs * tokens / setting.trainer.chip.flops
