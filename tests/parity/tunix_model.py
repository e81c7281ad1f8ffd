"""Makes a random Gemma-2-style model in Tunix's code, with the sizes of podrl's benchmarks."""

from typing import Any

import jax
from flax import nnx
from tunix.models.gemma import model as gemma


def make_model(args: Any, *, is_sampling: bool) -> Any:
    """Makes the model directly on the current mesh.

    Args:
      args: options of benchmarks.model, and `seed`.
      is_sampling: True for the shardings of Tunix's sampler, False for those of its trainer.
    """
    config = gemma.ModelConfig(
        num_layers=args.layers,
        num_embed=args.vocab,
        embed_dim=args.dim,
        hidden_dim=args.ffn,
        num_heads=args.heads,
        head_dim=args.head_dim,
        num_kv_heads=args.kv_heads,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=tuple(
            gemma.AttentionType.LOCAL_SLIDING if i % 2 == 0 else gemma.AttentionType.GLOBAL for i in range(args.layers)
        ),
        attn_logits_soft_cap=50.0,
        sliding_window_size=args.window,
        shd_config=gemma.ShardingConfig.get_default_sharding(is_sampling=is_sampling),
    )

    @nnx.jit
    def make() -> Any:
        model = gemma.Gemma(config, rngs=nnx.Rngs(args.seed))
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    return make()
