"""The times of a program's operations are added up by kind of operation."""

import jax
import jax.numpy as jnp

from benchmarks import operations


def test_each_operation_has_the_kind_of_its_slowest_part():
    text = """HloModule jit_f

%inner (a: f32[4], b: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %tanh.1 = f32[4]{0} tanh(%a)
  ROOT %dot.9 = f32[4]{0} dot(%tanh.1, %b)
}

%soft (a: f32[4]) -> f32[4] {
  %a.1 = f32[4]{0} parameter(0)
  ROOT %exp.1 = f32[4]{0} exponential(%a.1)
}

ENTRY %main (a: f32[4], b: f32[4]) -> f32[4] {
  %a.2 = f32[4]{0} parameter(0)
  %fusion.1 = f32[4]{0} fusion(%a.2, %a.2), kind=kCustom, calls=%inner
  %fusion.2 = f32[4]{0} fusion(%fusion.1), kind=kLoop, calls=%soft
  %gathered = (f32[4]{0}, f32[4]{0}) all-reduce(%fusion.1, %fusion.2), to_apply=%soft
  %loop = (f32[4]{0}, f32[4]{0}) while(%gathered), condition=%soft, body=%soft
  ROOT %copy.1 = f32[4]{0} copy(%fusion.2)
}
"""
    kinds = operations.kinds_of(text)
    wanted = {"fusion.1": "matrix products", "fusion.2": "exponentials", "gathered": "collectives", "copy.1": "other"}
    assert {name: kinds[name] for name in wanted} == wanted
    assert "loop" not in kinds


def test_a_trace_of_matrix_products_is_time_of_matrix_products(tmp_path):
    x = jnp.ones((256, 256))
    compiled = jax.jit(lambda x: x @ x @ x).lower(x).compile()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready([compiled(x) for _ in range(3)])
    seconds = operations.seconds_by_kind(compiled.as_text(), str(tmp_path))
    assert seconds["matrix products"] > 0
    assert seconds["collectives"] == seconds["exponentials"] == 0
