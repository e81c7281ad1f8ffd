import jax
import numpy as np

from podrl.engine.engine import Engine
from podrl.engine.sizes import engine_shape
from podrl.models import parameters


def test_programs_are_those_a_run_calls(tiny, tight, tight_config):
    """A worker calls the programs that `programs` compiles from shapes alone: same arguments, same shardings."""
    model, mesh = tight.model, tiny.mesh
    engine = Engine(model, mesh, engine_shape(tight_config, 2), np.dtype("float32"))
    programs = {p.name: p for p in engine.programs(parameters.abstract_params(model, mesh, np.dtype("float32")))}
    assert list(programs) == ["prepare", "prefill_8", "prefill_16", "insert", "generate", "spill", "restore"]
    prepared = engine.prepare(tiny.params)
    state = engine.init_state()
    rows = engine.put_rows(np.zeros((engine.shards, engine.read_shape.size), np.int32))
    chunks = engine.put_rows(engine.shape.pack_chunks(engine.shards, 16, []))
    for name, called in (("generate", (prepared, state, rows)), ("prefill_16", (prepared, state, chunks))):
        program = programs[name]
        same = jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, a.ndim),
            program.args,
            called,
        )
        assert all(jax.tree.leaves(same)), name
    compiled = {name: program.jitted.lower(*program.args).compile() for name, program in programs.items()}
    state = compiled["prefill_16"](prepared, state, chunks)
    state, emitted = compiled["generate"](prepared, state, rows)
    assert not np.asarray(emitted.count_R).any()
