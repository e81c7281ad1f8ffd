"""Counts the work of compiled programs: loops, slices, matrix products, collectives."""

# ruff: noqa: E501 - compiled text has long lines

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from podrl.mesh.build import make_mesh
from podrl.plan.hlo import Collective, cost_of

# A program with a loop of 3 rounds, then one all-gather of 4 x 4 floats in groups of 2. Each round adds 1, multiplies
# matrices of (8, 16) and (16, 4), which the TPU compiler writes as a convolution, and permutes 8 x 4 floats over 4
# devices.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4

%fused (param_0.1: f32[8,16], param_1.1: f32[5,16,4]) -> f32[8,4] {
  %param_0.1 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %param_1.1 = f32[5,16,4]{2,1,0:T(8,128)} parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,16,4]{2,1,0} dynamic-slice(%param_1.1, %zero, %zero, %zero), dynamic_slice_sizes={1,16,4}
  %flat = f32[16,4]{1,0} bitcast(%cut)
  ROOT %product = f32[8,4]{1,0:T(8,128)} convolution(%param_0.1, %flat), dim_labels=bf_io->bf
}

%body (state: (s32[], f32[8,16], f32[5,16,4], f32[8,4])) -> (s32[], f32[8,16], f32[5,16,4], f32[8,4]) {
  %state = (s32[], f32[8,16]{1,0:T(8,128)}, f32[5,16,4]{2,1,0}, f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %w = f32[5,16,4]{2,1,0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  %y = f32[8,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
  %sent = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0:S(1)}, u32[]{:S(2)}) collective-permute-start(%y), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %got = f32[8,4]{1,0:S(1)} collective-permute-done(%sent)
  ROOT %out = (s32[], f32[8,16]{1,0:T(8,128)}, f32[5,16,4]{2,1,0}, f32[8,4]{1,0}) tuple(%next, %x, %w, %got)
}

%condition (state: (s32[], f32[8,16], f32[5,16,4], f32[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,16]{1,0:T(8,128)}, f32[5,16,4]{2,1,0}, f32[8,4]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%state.1), index=0
  %last = s32[] constant(LAST)
  ROOT %more = pred[] compare(%j, %last), direction=LT
}

ENTRY %main (a: f32[8,16], b: f32[5,16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %b = f32[5,16,4]{2,1,0} parameter(1)
  %begin = s32[] constant(2)
  %empty = f32[8,4]{1,0} constant(0)
  %first = (s32[], f32[8,16]{1,0:T(8,128)}, f32[5,16,4]{2,1,0}, f32[8,4]{1,0}) tuple(%begin, %a, %b, %empty)
  %loop = (s32[], f32[8,16]{1,0:T(8,128)}, f32[5,16,4]{2,1,0}, f32[8,4]{1,0}) while(%first), condition=%condition, body=%body
  %part = f32[4,4]{1,0:S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %whole = f32[8,4]{1,0:S(1)} all-gather(%part), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}
  ROOT %result = f32[8,4]{1,0} get-tuple-element(%loop), index=3
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    cost = cost_of(TEXT.replace("LAST", "5"))
    assert cost.flops == 3 * 2 * 8 * 16 * 4
    # The product reads all of x and one of five slices of w, and writes y. The permute and the gather write to VMEM
    # only, so they do not count.
    assert cost.bytes == pytest.approx(3 * (4 * (8 * 16 + 16 * 4 + 8 * 4)), abs=3 * 16)
    assert cost.collectives == (
        Collective("all-gather", 1, 4 * 4 * 4, False),
        Collective("collective-permute", 3, 3 * 8 * 4 * 4, False),
    )
    permutes = {"count": 0.75, "bytes": 3 * 8 * 4}
    assert cost.by_kind(4) == {"all-gather": {"count": 0.25, "bytes": 16}, "collective-permute": permutes}
    both = dataclasses.replace(cost, collectives=(*cost.collectives, Collective("all-gather", 2, 6.0, True)))
    assert both.by_kind()["all-gather"] == {"count": 3, "bytes": 70}


def test_the_caller_says_how_often_a_traced_loop_runs():
    traced = TEXT.replace("constant(LAST)", "get-tuple-element(%state.1), index=0")
    assert cost_of(traced, trips=lambda depth: 7.0).flops == 7 * 2 * 8 * 16 * 4


def test_loops_of_a_named_scope_run_as_often_as_the_caller_says():
    named = TEXT.replace("body=%body", 'body=%body, metadata={op_name="jit(f)/outer/while/body/inner/while"}')
    cost = cost_of(named.replace("LAST", "5"), named={"outer": 100.0, "inner": 11.0})
    assert cost.flops == 11 * 2 * 8 * 16 * 4
    # The product reads x and a slice of w; the y that it writes does not count as read.
    assert cost.read == pytest.approx(11 * 4 * (8 * 16 + 16 * 4), abs=11 * 16)


def test_what_a_nested_fusion_passes_on_is_read():
    """A product reads its weight through an inner fusion that only passes the weight on."""
    nested = TEXT.replace(
        "%cut = f32[1,16,4]{2,1,0} dynamic-slice(%param_1.1, %zero, %zero, %zero), dynamic_slice_sizes={1,16,4}",
        "%cut = f32[5,16,4]{2,1,0} fusion(%param_1.1), kind=kLoop, calls=%same",
    ).replace(
        "%fused (",
        "%same (p: f32[5,16,4]) -> f32[5,16,4] {\n  %p = f32[5,16,4]{2,1,0} parameter(0)\n"
        "  ROOT %q = f32[5,16,4]{2,1,0} bitcast(%p)\n}\n\n%fused (",
        1,
    )
    read = [cost_of(text.replace("LAST", "5")).read for text in (nested, TEXT)]
    assert read[0] - read[1] == 3 * 4 * (5 - 1) * 16 * 4


def test_a_group_over_two_slices_uses_the_network_between_them():
    crossing = {c.kind: c.crosses for c in cost_of(TEXT.replace("LAST", "5"), slices=2).collectives}
    assert crossing == {"all-gather": True, "collective-permute": True}
    inside = TEXT.replace("{{0,2},{1,3}}", "[2,2]<=[4]").replace("{{0,1},{1,2},{2,3},{3,0}}", "{{0,1},{1,0}}")
    assert not any(c.crosses for c in cost_of(inside.replace("LAST", "5"), slices=2).collectives)


@pytest.mark.parametrize(
    ("groups", "sent"),
    [
        ("{{0,1,2,3}}", 3),
        ("[1,4]<=[4]", 3),
        ("[2,2]<=[2,2]T(1,0)", 1),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", 1),
        ("mesh['axis_0'=4,'axis_1'=1] {'axis_0'}", 3),
        ("mesh['axis_0'=4] {'axis_0':(1)2}", 1),
    ],
)
def test_an_all_gather_sends_its_part_to_the_others_of_its_group(groups: str, sent: int):
    text = TEXT.replace("{{0,2},{1,3}}", groups).replace("LAST", "5")
    assert cost_of(text).collectives[0].bytes == sent * 4 * 4 * 4


def test_padding_of_a_convolution_is_not_counted():
    """The convolution is a product with a batch of 4, as TPU programs write it: its window over the batch is mostly
    padding."""
    text = """HloModule m

ENTRY %main (x: f32[4,8,16], w: f32[4,16,2]) -> f32[4,8,2] {
  %x = f32[4,8,16]{2,1,0} parameter(0)
  %w = f32[4,16,2]{2,1,0} parameter(1)
  ROOT %y = f32[4,8,2]{2,1,0} convolution(%x, %w), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""
    assert cost_of(text).flops == 2 * 4 * 8 * 16 * 2


@pytest.mark.parametrize(
    ("kernel", "grid", "flops"),
    [
        # Two products over the lower triangle of 4 x 4 blocks, diagonal included: 10 of 16.
        ("splash_mha_fwd_segmented_residuals", "1,4,4", 2 * 2 * 2 * 8 * 512 * 512 * 64 * 10 / 16),
        ("splash_mha_dkv_segmented_no_residuals", "1,4,4", 2 * 4 * 2 * 8 * 512 * 512 * 64 * 10 / 16),
        # With a window, the kernel's list has 2 of the 4 blocks in each row of the grid.
        ("splash_mha_dq_segmented_no_residuals", "1,4,2", 2 * 3 * 2 * 8 * 512 * 512 * 64 / 2),
    ],
)
def test_attention_kernels_count_by_their_blocks(kernel: str, grid: str, flops: float):
    text = f"""HloModule m

ENTRY %main (g: s8[{grid}], q: bf16[2,8,512,64]) -> bf16[2,8,512,64] {{
  %g = s8[{grid}]{{2,1,0}} parameter(0)
  %q = bf16[2,8,512,64]{{3,2,1,0}} parameter(1)
  ROOT %{kernel}.3 = bf16[2,8,512,64]{{3,2,1,0}} custom-call(%g, %q), custom_call_target="tpu_custom_call"
}}
"""
    assert cost_of(text).flops == flops
    unknown = cost_of(text.replace(kernel, "other_kernel"))
    assert (unknown.flops, unknown.uncounted) == (0, ("other_kernel",))


@pytest.mark.parametrize(("kernel", "products"), [("jvp_prefix_attention_fwd_", 2), ("prefix_attention_dkv", 4)])
def test_the_kernel_for_shared_prompts_counts_as_if_all_before_were_seen(kernel: str, products: int):
    """A row of 1,500 tokens has 3 blocks, so 6 of 9 pairs of blocks count. `p` lists 6 pairs for each of 2 rows, and
    one more number."""
    text = f"""HloModule m

ENTRY %main (n: s32[], p: s32[13], w: s32[1], q: bf16[2,8,64,1500]) -> bf16[2,8,64,1500] {{
  %n = s32[]{{:T(128)}} parameter(0)
  %p = s32[13]{{0:T(128)}} parameter(1)
  %w = s32[1]{{0:T(128)}} parameter(2)
  %q = bf16[2,8,64,1500]{{3,2,1,0}} parameter(3)
  ROOT %{kernel}.3 = bf16[2,8,64,1500]{{3,2,1,0}} custom-call(%n, %p, %w, %q), custom_call_target="tpu_custom_call"
}}
"""
    assert cost_of(text).flops == 2 * products * 2 * 8 * 1500 * 1500 * 64 * 6 / 9


def test_a_scan_of_products_compiled_here():
    """The program has a loop over 6 layers inside a loop over 5 rows. Each layer multiplies (8, 32) by (32, 32)."""

    def forward(x_AXD, w_LDD):
        def row(carry, x_XD):
            out_XD, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_XD, w_LDD)
            return carry + jnp.sum(out_XD), None

        return jax.lax.scan(row, 0.0, x_AXD)[0]

    shapes = (jax.ShapeDtypeStruct((5, 8, 32), jnp.float32), jax.ShapeDtypeStruct((6, 32, 32), jnp.float32))
    text = jax.jit(forward).lower(*shapes).compile().as_text()
    assert cost_of(text).flops == 5 * 6 * 2 * 8 * 32 * 32


def test_collectives_of_a_sharded_program_compiled_here():
    mesh = make_mesh("fsdp=4", jax.devices()[:4])
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, Spec("fsdp")))
    whole = NamedSharding(mesh, Spec())
    text = jax.jit(lambda x: x * 2, out_shardings=whole).lower(x).compile().as_text()
    (found,) = cost_of(text).collectives
    assert dataclasses.astuple(found) == ("all-gather", 1, 3 * (8 * 16 * 4) / 4, False)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        cost_of("HloModule empty")


def test_what_a_slice_sends_to_another_crosses():
    text = """HloModule m, num_partitions=4

ENTRY %main (x: f32[8,128]) -> token[] {
  %x = f32[8,128]{1,0} parameter(0)
  %after = token[] after-all()
  %out = (f32[8,128]{1,0}, u32[], token[]) send(%x, %after), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %sent = token[] send-done(%out), channel_id=2
}
"""
    assert cost_of(text).collectives == (Collective("send", 1, 8 * 128 * 4, True),)


def test_a_grouped_kernel_reads_of_all_matrices_those_that_the_caller_counts():
    text = """
HloModule experts, num_partitions=1

ENTRY %main (n: s32[17], x: bf16[64,32], w: bf16[16,32,8]) -> bf16[64,8] {
  %n = s32[17]{0} parameter(0)
  %x = bf16[64,32]{1,0} parameter(1)
  %w = bf16[16,32,8]{2,1,0} parameter(2)
  ROOT %gmm.3 = bf16[64,8]{1,0} custom-call(%n, %x, %w), custom_call_target="tpu_custom_call"
}
"""
    rest = 4 * 17 + 2 * 64 * 32
    assert cost_of(text, named={"gmm": 4}).read == rest + 4 * 2 * 32 * 8
    assert cost_of(text).read == cost_of(text, named={"gmm": 16}).read == rest + 16 * 2 * 32 * 8


def test_a_kernel_reads_of_a_pool_the_pages_that_the_caller_counts():
    text = """
HloModule pages, num_partitions=1

ENTRY %main (n: s32[8], q: f32[4,2,8,128], k: bf16[3,10,2,16,128]) -> f32[4,2,8,128] {
  %n = s32[8]{0} parameter(0)
  %q = f32[4,2,8,128]{3,2,1,0} parameter(1)
  %k = bf16[3,10,2,16,128]{4,3,2,1,0} parameter(2)
  ROOT %own_pages.3 = f32[4,2,8,128]{3,2,1,0} custom-call(%n, %q, %k, %k), custom_call_target="tpu_custom_call"
}
"""
    queries, page = 4 * 4 * 2 * 8 * 128, 2 * 2 * 16 * 128
    cost = cost_of(text, named={"own_pages": 7, "shared_pages": 5})
    assert cost.read == 4 * 8 + queries + 2 * 7 * page and cost.bytes == cost.read + queries
    assert cost_of(text).read == 4 * 8 + queries + 2 * 3 * 10 * page, "without `named`, all 10 pages count as read"


ON_SPARSE_CORES = """HloModule jit_f, is_scheduled=true, num_partitions=4

%called (p: f32[64,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %reduced = f32[64,128]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}

%view (v: f32[9,64,128]) -> f32[9,64,128] {
  %v = f32[9,64,128]{2,1,0:T(16,128)} parameter(0)
  ROOT %same = f32[9,64,128]{2,1,0:T(8,128)} copy(%v)
}

%slice (stack: f32[9,64,128], at: s32[]) -> f32[64,128] {
  %stack = f32[9,64,128]{2,1,0:T(16,128)} parameter(0)
  %tiled = f32[9,64,128]{2,1,0:T(8,128)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%view
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%tiled, %at, %zero, %zero), dynamic_slice_sizes={1,64,128}
  ROOT %layer = f32[64,128]{1,0:T(8,128)} bitcast(%one)
}

ENTRY %main (weights: f32[9,64,128], number: s32[]) -> f32[64,128] {
  %weights = f32[9,64,128]{2,1,0:T(16,128)} parameter(0)
  %number = s32[] parameter(1)
  %taken = f32[64,128]{1,0:T(8,128)} fusion(%weights, %number), kind=kLoop, calls=%slice
  %begun = ((f32[64,128]{1,0}), f32[64,128]{1,0}) call-start(%taken), async_execution_thread="sparsecore", to_apply=%called
  ROOT %done = f32[64,128]{1,0} call-done(%begun)
}
"""


def test_programs_of_tpu7x_read_slices_in_another_tiling_and_send_by_their_sparse_cores():
    """A fusion may return its operand in another tiling. Then only the part of the result that is read counts: with the
    whole operand counted, a layer would read all layers."""
    cost = cost_of(ON_SPARSE_CORES)
    layer = 64 * 128 * 4
    assert cost.by_kind() == {"all-reduce": {"count": 1, "bytes": 2 * 3 / 4 * layer}}
    assert cost.read == 2 * layer + 4  # the slice of the weights, its index, and the operand of the all-reduce
    later = (  # jax 0.11 writes this: the start has no operands yet
        "%asked = ((), (), s32[]) call-start(), to_apply=%called\n"
        "  %begun = ((f32[64,128]{1,0}), f32[64,128]{1,0}) call-update(%asked, %taken), to_apply=%called\n"
    )
    assert cost_of(re.sub(r"%begun = .*\n", later, ON_SPARSE_CORES)) == cost
    assert cost_of(ON_SPARSE_CORES.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")).read > 9 * layer
