"""Tiles of the TPU kernels for experts: how many rows they compute in vain, and how much VMEM they need."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from podrl.models import dispatch, tiles
from podrl.models.sizes import SIZES, config_of

WIDTHS = sorted(
    {(c.model_dim, alike.experts.ffn_dim) for c in map(config_of, SIZES) for alike in c.alike() if alike.experts}
)


@pytest.mark.parametrize("item", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 300, 1024, 5000, 1e6])
@pytest.mark.parametrize(("dim", "ffn"), WIDTHS)
def test_tiles_of_published_sizes_fit_near_memory_and_waste_little(dim, ffn, rows, item):
    for x, y in ((dim, ffn), (ffn, dim)):
        rows_tile, left, right = tiles.for_rows(rows, x, y, item)
        _, outer_left, outer_right = tiles.for_outer(rows, x, y, item)
        moved = rows_tile * left + left * right + rows_tile * right
        assert 2 * item * moved + 4 * rows_tile * right <= 12 << 20
        outer = rows_tile * (outer_left + outer_right) + outer_left * outer_right
        assert 2 * item * outer + 4 * outer_left * outer_right <= 12 << 20
        for size, width in ((x, left), (y, right), (x, outer_left), (y, outer_right)):
            assert width == size or width % 128 == 0
            assert math.ceil(size / width) * width <= 1.07 * size
        assert tiles.ROWS % rows_tile == 0


@pytest.mark.parametrize("rows", [1, 16, 100, 511, 512, 1024, 2048, 4096, 100_000])
def test_experts_with_many_rows_compute_few_rows_of_others(rows):
    """A tile larger than the smallest has at most a quarter of an expert's rows; a tile smaller than the largest has
    more than an eighth of them."""
    tile = tiles.row_tile(rows)
    assert tile == 128 or rows >= 4 * tile
    assert tile == tiles.ROWS or rows < 8 * tile


def test_a_matrix_is_read_once_for_each_expert_where_it_fits():
    assert tiles.for_rows(16, 2048, 768, 2)[1:] == (2048, 768)  # Qwen3-30B-A3B
    assert tiles.for_rows(16, 2880, 2880, 2)[1] == 2880  # gpt-oss, whose width is no multiple of 128


@pytest.mark.parametrize(("count", "parts", "most"), [(32, 4, 1.14), (32, 1, 1.26), (8, 8, 1.07)])
def test_kernels_compute_few_rows_in_vain(count, parts, most):
    """Counts the tiles that the kernel visits, for random routes of 4,096 tokens of each device, 8 experts a token.

    With one part, an expert's padding would lengthen the arrays by a quarter, so rows are not aligned.
    """
    tokens = 4096 * parts
    scores = np.random.default_rng(0).random((tokens, count * parts))
    plan = dispatch._plan(
        jnp.asarray(np.argpartition(scores, 8)[:, :8]), dispatch.Form(count, parts, "silu", 1.0, tpu=True)
    )
    assert len(plan.token_P) <= 1.13 * 8 * tokens
    tile = tiles.row_tile(8 * tokens / (count * parts))
    _, visited = make_group_metadata(
        group_sizes=plan.padded_E,
        m=len(plan.token_P),
        tm=tile,
        start_group=0,
        num_nonzero_groups=count,
        visit_empty_groups=False,
    )
    assert int(plan.count_E.sum()) <= int(visited) * tile <= most * int(plan.count_E.sum())
