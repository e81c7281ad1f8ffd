"""A model with experts in the engine: what it samples is what the full forward pass gives."""

import pytest

from podrl.models.config import GLOBAL_WINDOW, Experts, ModelConfig, RopeScaling
from podrl.rollout import engine as engine_module
from podrl.rollout.config import Sampling
from podrl.types import Policy


def model_of(experts: Experts, layers: int = 2) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=300,
        num_layers=layers,
        model_dim=32,
        ffn_dim=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        activation="silu",
        norm_eps=1e-6,
        norm_plus_one=False,
        post_norms=False,
        qk_norm=True,
        qkv_bias=False,
        embed_scale=1.0,
        tie_embeddings=False,
        query_scale=8**-0.5,
        attn_softcap=0.0,
        logit_softcap=0.0,
        window_L=(GLOBAL_WINDOW,) * layers,
        rope_theta_L=(10_000.0,) * layers,
        rope_scaling_L=(RopeScaling(),) * layers,
        max_length=256,
        experts=experts,
    )


MODEL = model_of(Experts(8, 2, 16))


@pytest.mark.parametrize(
    ("spec", "unrolled"), [("data=2", 12), ("data=2", 0), ("fsdp=2", 0), ("data=1,fsdp=2,tensor=2", 12)]
)
def test_samples_have_the_probabilities_of_the_full_forward_pass(
    tiny_on, tight_config, prompts_of, check, monkeypatch, spec, unrolled
):
    """Layers unrolled and scanned, whole experts and cut ones; pages are spilled and prompts shared."""
    monkeypatch.setattr(engine_module, "UNROLLED_LAYERS", unrolled)
    tiny = tiny_on(spec, 4 if "tensor" in spec else 2, MODEL)
    worker = tiny.worker(tight_config, warm=False)
    sampling = Sampling(max_new=12)
    rollouts = worker.generate(
        Policy(tiny.params, 7), prompts_of([5, 20, 9, 1]), group_size=4, step=3, sampling=sampling
    )
    check(tiny, rollouts, sampling)
