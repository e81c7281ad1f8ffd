"""The decode engine's programs on the rollout mesh: prefill, insert and generate, as in JetStream."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int

from podrl.engine import attention
from podrl.engine.page_attention import chosen
from podrl.engine.reads import ReadList
from podrl.engine.sampling import LaneSampling, draw
from podrl.engine.state import FREE, SEAT, DecodeState, EngineShape, LaneUpdates, SampledTokens
from podrl.mesh import rules
from podrl.mesh.build import check_decodes
from podrl.models import decoder, delta, moe, parameters
from podrl.models.attention import on_gpu, on_tpu
from podrl.models.config import ModelConfig
from podrl.models.sizes import parameter_count
from podrl.types import DRAWN, PyTree

UNROLLED_LAYERS, UNROLLED_ON_GPU = 12, 64  # largest numbers of layers that are unrolled (`unrolls`)
_UNROLLED_BYTES = 4 << 30


class EngineProgram(NamedTuple):
    """A jitted function of the engine, and the arguments that it is compiled for.

    Attributes:
      name: name of the program, such as 'generate' or 'prefill_64'.
      jitted: the jitted function.
      args: arguments of the function, with shapes, dtypes and shardings in place of arrays.
    """

    name: str
    jitted: Any
    args: tuple[PyTree, ...]


def unrolls(model: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> bool:
    """Returns True if programs take the weights of each layer as arrays of their own, instead of scanning over layers.

    A scan copies the weights of every layer in each decode step. Unrolled layers need no such copies, but the device
    holds the weights twice. On a GPU the copies take a fifth of a decode step of 28 layers
    (docs/measurements/chips.md). So a GPU may unroll up to 64 layers instead of 12, if the weights take at most 4 GiB
    times the size of the axis `tensor`.
    """
    if not on_gpu(mesh):
        return model.num_layers <= UNROLLED_LAYERS
    small = parameter_count(model) * jnp.dtype(dtype).itemsize <= _UNROLLED_BYTES * mesh.shape["tensor"]
    return model.num_layers <= (UNROLLED_ON_GPU if small else UNROLLED_LAYERS)


class Engine:
    """Compiled programs of one model on one mesh. Weights and state are arguments: the engine holds no arrays.

    Attributes:
      model: the policy's architecture.
      mesh: the rollout mesh.
      shape: sizes of a data-parallel shard.
      dtype: dtype of weights and pools.
      shards: number of data-parallel shards of the mesh.
      read_shape: sizes of a shard's read list.
      unrolled: True if programs take the weights of each layer as arrays of their own (`unrolls`).
      kernel: True if decoding uses the attention kernel of the mesh's devices.
      routes: True if the model has experts; the programs then record the experts that each token takes.
      several_hosts: True if the mesh has devices of several processes.
      generate: program that decodes up to `shape.steps` tokens per lane (`_generate`).
      bulk_insert: program that seats samples in lanes and frees lanes (`LaneUpdates`).
      prefills: prefill program of each bucket (`_prefill`).
      prepare: program that converts weights to the form that the other programs take (`_prepare`).
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        shape: EngineShape,
        dtype: jnp.dtype,
        *,
        several_hosts: bool = False,
        kernel: bool | None = None,
    ):
        """Stores the model and the shapes; programs are compiled when they are first used.

        Args:
          model: the policy's architecture.
          mesh: the rollout mesh, cut over any of the axes data, expert, fsdp and tensor.
          shape: sizes of a data-parallel shard.
          dtype: dtype of weights and pools.
          several_hosts: True if the mesh's devices belong to several processes. All of them call the same programs in
            the same order, and every host of a replica can read all results of the replica.
          kernel: True to decode with the attention kernel of the mesh's devices; None uses it where it pays
            (`podrl.engine.page_attention.chosen`).
        """
        check_decodes(mesh, key="mesh of the engine")
        moe.check_mesh(model, mesh, key="mesh of the engine")
        self.several_hosts = several_hosts
        self.model, self.mesh, self.shape, self.dtype = model, mesh, shape, jnp.dtype(dtype)
        self.shards = rules.batch_shards(mesh)
        self.unrolled = unrolls(model, mesh, dtype)
        self.read_shape = shape.reads()
        assert bool(shape.slots) == model.recurrent, (shape.slots, model.family)
        kinds = model.alike()
        self._attending = [m for m in kinds if m.delta is None and not m.reuses_keys]
        self._recurrent = [m for m in kinds if m.delta is not None]
        # Number of each kind of layers, counted among the attention kinds or among the kinds of linear attention.
        # Layers that reuse keys have the number of the kind whose keys they reuse.
        self._number = [sum((m.delta is None) == (n.delta is None) for n in kinds[:k]) for k, m in enumerate(kinds)]
        for k, kind in enumerate(model.kinds):
            self._number[k] = self._number[kind.keys_of] if kind.keys_of >= 0 else self._number[k]
        # Place of each kind's first layer among all layers with experts, in the order of recorded routes.
        routed = [0 if m.experts is None else m.num_layers for m in kinds]
        self._first_routed = [sum(routed[:k]) for k in range(len(kinds))]
        self.kernel = all(
            chosen(kernel, alike, mesh, shape.page_tokens, self.read_shape, dtype) for alike in self._attending
        )
        self.routes = model.experts is not None
        self._rows = NamedSharding(mesh, self._batch_spec())
        self._shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._state_specs())
        self.generate = self._program(self._generate, flat_args=1, out=self._emitted_specs())
        self.bulk_insert = self._program(self._insert, flat_args=1, weights=False)
        self._write = self._program(self._write_pages, flat_args=1, blocks=self._pool_specs(), weights=False)
        self._read = self._reader(lambda state: state.pools, self._pool_specs())
        self._read_routes = self._reader(lambda state: state.pools[-1:], self._pool_specs()[-1:])
        self._read_memory = self._reader(lambda state: state.memories, self._memory_specs())
        self._write_memory = self._program(
            self._write_memories, flat_args=1, blocks=self._memory_specs(), weights=False
        )
        self._copy_memory = self._program(self._copy_memories, flat_args=1, weights=False)
        self.prefills = {
            bucket: self._program(functools.partial(self._prefill, bucket), flat_args=1) for bucket in shape.buckets
        }
        # Not jitted if the weights stay unchanged, because a program's results would be a second copy of the weights.
        self.prepare = jax.jit(self._prepare) if self.unrolled else self._prepare

    # Shapes and shardings.

    def _batch_spec(self) -> Spec:
        return rules.spec_for(("batch",), (self.shards,), self.mesh)

    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape, dtype and sharding of each array of `DecodeState.pools`."""
        M, C = self.shards * self.shape.pages, self.shape.page_tokens
        shapes = []
        for m in self._attending:
            shapes += [((m.num_layers, M, m.num_kv_heads, C, m.head_dim), self.dtype)] * 2
        if self.routes:
            assert self.model.experts is not None
            k, dtype = self.model.experts.chosen, moe.route_dtype(self.model.experts)
            shapes.append(((self.model.routed_layers, M, 1, C, k), dtype))
        axes = ("layers", "batch", "kv_heads", "time", "head_dim")
        return tuple(
            jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding_for(axes, shape, self.mesh))
            for shape, dtype in shapes
        )

    def memories(self, places: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape, dtype and sharding of each array of `DecodeState.memories`.

        Args:
          places: number of places per shard; None for `EngineShape.places`.
        """
        P, shapes = self.shards * (self.shape.places if places is None else places), []
        for m in self._recurrent:
            layers, arrays = (1, m.num_layers) if self.unrolled else (m.num_layers, 1)
            pair = []
            for rest, dtype in zip(delta.memory_shapes(m), (jnp.dtype(jnp.float32), self.dtype), strict=True):
                shape, axes = (layers, P, *rest), ("layers", "batch", "heads", *["norm"] * (len(rest) - 1))
                pair.append(jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding_for(axes, shape, self.mesh)))
            shapes += pair * arrays
        return tuple(shapes)

    def _memory_of(self, number: int, index: Array | int) -> tuple[int, Array | int]:
        """Returns the number of a layer's pair of arrays in `DecodeState.memories`, and the layer's index in the pair.

        Each unrolled layer has its own pair: if layers shared a stacked array, XLA would copy the stack at every
        update.

        Args:
          number: number of the layer's kind among the kinds of linear attention.
          index: index of the layer among the layers of its kind.
        """
        if not self.unrolled:
            return number, index
        assert isinstance(index, int)
        return sum(m.num_layers for m in self._recurrent[:number]) + index, 0

    def _memory_specs(self) -> tuple[Spec, ...]:
        return tuple(cast(NamedSharding, memory.sharding).spec for memory in self.memories())

    def blocks(self, pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns, for each pool, shape, dtype and sharding of an array that holds `pages` pages of each shard."""
        dims = [(p, (p.shape[0], self.shards * pages, *p.shape[2:])) for p in self.pools()]
        return tuple(jax.ShapeDtypeStruct(shape, p.dtype, sharding=p.sharding) for p, shape in dims)

    def _pool_specs(self) -> tuple[Spec, ...]:
        return tuple(cast(NamedSharding, pool.sharding).spec for pool in self.pools())

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools and memories, summed over all devices."""
        arrays = (*self.pools(), *self.memories())
        shards = [(cast(NamedSharding, x.sharding).shard_shape(x.shape), x.dtype) for x in arrays]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards) * self.mesh.size

    @property
    def pool_sharding(self) -> NamedSharding:
        """Sharding of the pools and of copies of pages."""
        return NamedSharding(self.mesh, self._pool_specs()[0])

    def _state_specs(self) -> DecodeState:
        pools: Any = self._pool_specs()
        row: Any = self._batch_spec()
        memories: Any = self._memory_specs()
        return DecodeState(pools, row, row, row, row, LaneSampling(row, row, row, row, row), row, memories)

    def _emitted_specs(self) -> SampledTokens:
        row: Any = self._batch_spec()
        drawn: Any = dict.fromkeys(DRAWN, row)
        return SampledTokens(row, drawn, row, row, row, row)

    def _manual(self, spec: Spec) -> Spec:
        """Drops the axis `tensor` from a spec: XLA partitions the programs over `tensor`, but over no other axis."""
        kept = [
            tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a != "tensor") or None for e in tuple(spec)
        ]
        return Spec(*(e[0] if e and len(e) == 1 else e for e in kept))

    def _mapped(self, local: Callable, specs: tuple) -> Callable:
        """Maps `local` over the data-parallel shards; `specs` are the specs of its arguments and of its results."""
        is_spec = lambda x: isinstance(x, Spec)  # noqa: E731
        tensor = self.mesh.shape["tensor"] > 1
        inside, outside = jax.tree.map(self._manual, specs, is_leaf=is_spec) if tensor else specs
        names = set(self.mesh.axis_names) - ({"tensor"} if tensor else set())
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=inside, out_specs=outside, axis_names=names, check_vma=False
        )

    def _program(
        self,
        local: Callable,
        *,
        flat_args: int,
        blocks: tuple[Spec, ...] = (),
        weights: bool = True,
        out: PyTree = None,
    ) -> Callable:
        """Jits `local(params?, state, *flat, *blocks) -> (state, out?)`; the state is donated.

        Args:
          local: the function that runs on each shard.
          flat_args: number of arguments `flat`, arrays cut by rows.
          blocks: specs of the arguments `blocks`.
          weights: True if `local` takes `params`.
          out: specs of the results beside the state; None if there are none.
        """
        row, state = self._batch_spec(), self._state_specs()
        inside = (*([self._param_specs()] if weights else []), state, *[row] * flat_args, *blocks)
        mapped = self._mapped(local, (inside, state if out is None else (state, out)))
        shardings = jax.tree.map(self._shown, out, is_leaf=lambda x: isinstance(x, Spec))
        return jax.jit(
            mapped,
            donate_argnums=(1,) if weights else (0,),
            out_shardings=self._shardings if out is None else (self._shardings, shardings),
        )

    def _reader(self, pools: Callable[[DecodeState], tuple[Array, ...]], specs: tuple[Spec, ...]) -> Callable:
        """Jits `read(state, page_M)`, which copies some pages, or places of memories, of each shard.

        Args:
          pools: function that returns the arrays of a state to copy from: pools or memories.
          specs: specs of these arrays.
        """

        def _read_pages(state: DecodeState, page_M: Int[Array, " J"]) -> tuple[Array, ...]:
            return tuple(pool[:, page_M] for pool in pools(state))

        mapped = self._mapped(_read_pages, ((self._state_specs(), self._batch_spec()), specs))
        return jax.jit(mapped, out_shardings=tuple(map(self._shown, specs)) if self.several_hosts else None)

    def _param_specs(self) -> PyTree:
        """Returns the specs of prepared parameters."""

        def spec(param: parameters.Param, split: bool) -> Spec:
            cut = 1 if split else 0
            return rules.spec_for(param.axes[cut:], param.shape[cut:], self.mesh)

        specs = parameters.param_specs(self.model)
        stacks = [
            {name: spec(param, self.unrolled) for name, param in stack.items()}
            for stack in parameters.stacks_of(specs["layers"], self.model)
        ]
        tree = {name: spec(param, False) for name, param in specs.items() if name != "layers"}
        if self.unrolled:
            return {**tree, "layers": [stacks[kind] for kind, _ in self.model.places()]}
        return {**tree, "layers": parameters.as_layers(stacks, self.model)}

    def _shown(self, spec: Spec) -> NamedSharding:
        """Returns the sharding of a result that hosts read.

        If the mesh has several hosts, each host of a replica gets all of the replica's rows.
        """
        if self.several_hosts:  # the result stays cut over `data`, because hosts read only the rows of their replica
            spec = Spec(*("data" if "data" in ((e,) if isinstance(e, str) else e or ()) else None for e in spec))
        return NamedSharding(self.mesh, spec)

    def put_rows(self, rows: np.ndarray) -> Array:
        """Copies a host array onto the mesh; its first axis is divided among the data-parallel shards."""
        return self.put(rows, self._rows)

    def put(self, array: np.ndarray, place: NamedSharding) -> Array:
        """Copies a host array onto the mesh; each host has the whole array, and copies its own devices' part."""
        if self.several_hosts:
            return jax.make_array_from_callback(array.shape, place, lambda index: array[index])
        return jax.device_put(array, place)

    # The programs' functions, which run on each shard.

    def _prepare(self, params: PyTree) -> PyTree:
        """Converts weights to the programs' form: one tree per layer if layers are unrolled, else unchanged."""
        if not self.unrolled:
            return params
        stacks = parameters.stacks_of(params["layers"], self.model)
        layers = [{name: x[i] for name, x in stacks[kind].items()} for kind, i in self.model.places()]
        return {**params, "layers": layers}

    def _empty_state(self) -> DecodeState:
        s = self.shape
        R = self.shards * s.lanes
        pools = self._zeros(lambda pool: pool.shape)
        whole = jnp.zeros(R, jnp.int32)
        real = jnp.zeros(R, jnp.float32)
        sampling = LaneSampling(real, real, real, whole, jnp.zeros((R, 2), jnp.uint32))
        stop_RE = jnp.full((R, s.stop_ids), -1, jnp.int32)
        memories = tuple(jnp.zeros(memory.shape, memory.dtype) for memory in self.memories())
        return DecodeState(pools, whole, whole, whole, jnp.zeros(R, bool), sampling, stop_RE, memories)

    def _zeros(self, size: Callable[[jax.ShapeDtypeStruct], tuple[int, ...]]) -> tuple[Array, ...]:
        """Makes an array of zeros for each pool, of the shape that `size` returns; keys and values share one array."""
        arrays: list[Array] = []
        for i, pool in enumerate(self.pools()):
            arrays.append(arrays[-1] if i % 2 else jnp.zeros(size(pool), pool.dtype))
        return tuple(arrays)

    def init_state(self) -> DecodeState:
        """Allocates empty pools and lanes on the mesh, in their final sharding."""
        return jax.jit(self._empty_state, out_shardings=self._shardings)()

    def programs(self, params: PyTree) -> list[EngineProgram]:
        """Lists every program of the engine with its arguments as shapes and shardings; allocates nothing.

        Args:
          params: the model's parameters, or their shapes and shardings (`parameters.abstract_params`).

        Returns:
          The programs; `program.jitted.lower(*program.args).compile()` builds one.
        """
        s, J = self.shape, self.shape.max_pages
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        prepared = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)),
            jax.eval_shape(self._prepare, abstract),
            self._param_specs(),
        )
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self._empty_state),
            self._shardings,
        )
        updates = LaneUpdates.empty(self.shards * s.lanes, s.stop_ids).packed()

        def rows(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)

        prefills = [
            EngineProgram(
                f"prefill_{bucket}", self.prefills[bucket], (prepared, state, rows(*s.chunk_shape(self.shards, bucket)))
            )
            for bucket in s.buckets
        ]
        memory = [
            EngineProgram("copy", self._copy_memory, (state, rows(*s.pack_copies(self.shards, []).shape))),
            EngineProgram("spill_memory", self._read_memory, (state, rows(self.shards))),
            EngineProgram("restore_memory", self._write_memory, (state, rows(self.shards), *self.memories(1))),
        ]
        return [
            *([EngineProgram("prepare", self.prepare, (abstract,))] if self.unrolled else []),
            *prefills,
            EngineProgram("insert", self.bulk_insert, (state, rows(*updates.shape))),
            EngineProgram("generate", self.generate, (prepared, state, rows(self.shards, self.read_shape.size))),
            EngineProgram("spill", self._read, (state, rows(self.shards * J))),
            EngineProgram("restore", self._write, (state, rows(self.shards * J), *self.blocks(J))),
            *([EngineProgram("routes", self._read_routes, (state, rows(self.shards * J)))] if self.routes else []),
            *(memory if s.slots else []),
        ]

    def _insert(self, state: DecodeState, packed_RI: Int[Array, "R I"]) -> DecodeState:
        new: Any = LaneUpdates.unpacked(packed_RI)
        seat_R = new.action_R == SEAT
        sampling = LaneSampling(new.temperature_R, new.top_p_R, new.min_p_R, new.top_k_R, new.key_R2)
        pick = lambda x, y: jnp.where(seat_R.reshape(-1, *[1] * (x.ndim - 1)), x, y)  # noqa: E731
        return dataclasses.replace(
            state,
            token_R=pick(new.token_R, state.token_R),
            position_R=pick(new.position_R, state.position_R),
            left_R=pick(new.left_R, state.left_R),
            live_R=jnp.where(seat_R, new.left_R > 0, state.live_R & (new.action_R != FREE)),
            sampling=jax.tree.map(pick, sampling, state.sampling),
            stop_RE=pick(new.stop_RE, state.stop_RE),
        )

    def _gathered(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Gathers weights that are cut over fsdp."""

        def whole(x: Array, spec: Spec) -> Array:
            for dim, entry in enumerate(spec):
                if entry == "fsdp" or (isinstance(entry, tuple) and "fsdp" in entry):
                    x = jax.lax.all_gather(x, "fsdp", axis=dim, tiled=True)
            return x

        return jax.tree.map(whole, tree, specs)

    def _layers(
        self,
        params: PyTree,
        infos: Sequence[decoder.LayerInfo],
        x: Array,
        carry: PyTree,
        layer_fn: Callable,
        *,
        with_keys: bool = False,
    ) -> tuple[Array, PyTree]:
        """Runs `layer_fn(x, carry, layer, info, index, kind) -> (x, carry)` over the layers.

        `kind` is the number of the layer's kind, and `index` the layer's index among the layers of this kind. If
        `with_keys` is True, the last layers are left out if they reuse the keys of earlier layers.
        """
        specs = self._param_specs()["layers"]
        if self.unrolled:
            for (kind, i), layer, spec in zip(self.model.places(), params["layers"], specs, strict=True):
                if with_keys and self.model.kinds and self.model.kinds[kind].keys_of >= 0:
                    break
                info = jax.tree.map(lambda a: a[i], infos[kind])  # noqa: B023
                x, carry = layer_fn(x, carry, self._gathered(layer, spec), info, i, kind)
            return x, carry
        if self.model.kinds:
            infos = [dataclasses.replace(info, index=jnp.arange(len(info.window))) for info in infos]

        steps, scanned = [], []
        stacks = (parameters.stacks_of(tree, self.model) for tree in (params["layers"], specs))
        for kind, (stack, cuts) in enumerate(zip(*stacks, strict=True)):
            # A scan would copy each layer's experts in every step. So the scan's body gets the experts of all layers
            # and picks those of its layer by index. Experts that are cut over fsdp are gathered layer by layer instead.
            whole = {
                name: x for name, x in stack.items() if name.startswith("expert_") and self.mesh.shape["fsdp"] == 1
            }
            sliced = {name: Spec(*cut[1:]) for name, cut in cuts.items() if name not in whole}
            rest = {name: x for name, x in stack.items() if name not in whole}
            # With several kinds of layers, a scan over repetitions of their pattern would copy the weights of each
            # repetition before the scans inside the repetition read them. So the body picks all weights by index.
            picked, rest = (rest, {}) if self.model.kinds else ({}, rest)

            def body(
                state: tuple,
                xs: tuple,
                kind: int = kind,
                whole: PyTree = whole,
                sliced: PyTree = sliced,
                picked: PyTree = picked,
            ) -> tuple:
                layer, info = xs
                layer |= {n: jax.lax.dynamic_index_in_dim(x, info.index, keepdims=False) for n, x in picked.items()}
                return layer_fn(*state, self._gathered(layer, sliced) | whole, info, info.index, kind), None

            steps.append(body)
            scanned.append((rest, infos[kind]))
        for pattern in self.model.patterns()[: 1 if with_keys else None]:
            (x, carry), _ = decoder.over_layers(steps, (x, carry), scanned, pattern)
        return x, carry

    def _routed(
        self,
        h_BTD: Array,
        layer: PyTree,
        info: decoder.LayerInfo,
        router_BTD: Array | None,
        real_BT: Array | None = None,
    ) -> tuple[Array, Array]:
        mesh, tpu = jax.sharding.get_abstract_mesh(), on_tpu(self.mesh)
        feed_forward = functools.partial(moe.feed_forward, mesh=mesh, inside=True, tpu=tpu)
        return feed_forward(h_BTD, layer, info.index, self.model, router_BTD=router_BTD, real_BT=real_BT)

    def _ends(self, params: PyTree) -> PyTree:
        """Gathers embedding, final norm and output matrix along fsdp."""
        specs = self._param_specs()
        return {name: self._gathered(params[name], specs[name]) for name in params if name != "layers"}

    def _generate(
        self, params: PyTree, state: DecodeState, flat_XI: Int[Array, "1 I"]
    ) -> tuple[DecodeState, SampledTokens]:
        """Decodes up to `steps` tokens in every live lane; stops early when no lane is live (see `_any`)."""
        model, shape = self.model, self.shape
        reads = self.read_shape.split(flat_XI[0])
        R, N = shape.lanes, shape.steps
        ends = self._ends(params)
        # The dispatch's own additions to each pool, (L, R, K, N, H), where N is its number of decode steps. They are
        # written to pages once, when the dispatch ends.
        recents = self._zeros(lambda p: (p.shape[0], R, p.shape[2], N, p.shape[4]))
        outputs = SampledTokens(
            jnp.zeros((N, R), jnp.int32),
            {name: jnp.full((N, R), column.fill, column.dtype) for name, column in DRAWN.items()},
            jnp.zeros(R, jnp.int32),
            state.live_R,
            jnp.zeros(R, bool),
            jnp.zeros(1, jnp.int32),
        )
        pools = state.pools

        def step(carry: tuple) -> tuple:
            n, (token_R, position_R, left_R, live_R), memory, out, _ = carry
            hidden_R1D, memory = self._decode_step(params, ends, pools, reads, n, (token_R, position_R, live_R), memory)
            logits_RV = decoder.unembed(ends, hidden_R1D, model)[:, 0]
            drawn = draw(logits_RV, state.sampling, position_R + 1, live_R)
            failed_R = live_R & drawn.failed_R
            drew_R = live_R & ~failed_R
            out = dataclasses.replace(
                out,
                tokens_RT=out.tokens_RT.at[n].set(drawn.token_R),
                drawn={name: x_RT.at[n].set(getattr(drawn, f"{name}_R")) for name, x_RT in out.drawn.items()},
                count_R=out.count_R + drew_R,
                failed_R=out.failed_R | failed_R,
            )
            left_R = left_R - live_R
            ended_R = jnp.any(drawn.token_R[:, None] == state.stop_RE, axis=1) | (left_R <= 0)
            lanes = (jnp.where(live_R, drawn.token_R, token_R), position_R + drew_R, left_R, drew_R & ~ended_R)
            return n + 1, lanes, memory, out, self._any(lanes[3])

        lanes = (state.token_R, state.position_R, state.left_R, state.live_R)
        scratch = tuple(
            () if self.kernel else attention.make_scratch(reads, m.num_kv_heads, m.num_heads, m.head_dim)
            for m in self._attending
        )
        carry = (jnp.int32(0), lanes, (recents, scratch, state.memories), outputs, self._any(state.live_R))
        with jax.named_scope("decode_steps"):
            n, lanes, (recents, _, memories), out, _ = jax.lax.while_loop(lambda c: (c[0] < N) & c[4], step, carry)
        flushed = [self._flush(pool, new, reads, state.live_R) for pool, new in zip(pools, recents, strict=True)]
        token_R, position_R, left_R, live_R = lanes
        turned = {name: x_RT.T for name, x_RT in out.drawn.items()}
        out = dataclasses.replace(out, tokens_RT=out.tokens_RT.T, drawn=turned, live_R=live_R, steps_X=n[None])
        state = dataclasses.replace(
            state,
            pools=tuple(flushed),
            token_R=token_R,
            position_R=position_R,
            left_R=left_R,
            live_R=live_R,
            memories=memories,
        )
        return state, out

    def _any(self, live_R: Array) -> Array:
        """Returns True while this shard, or a shard that must run equally many decode steps, has a live lane."""
        alive = jnp.any(live_R)
        # A collective deadlocks unless all its shards run it equally often. Shards gather weights over fsdp and
        # exchange tokens over expert, so shards along these axes take the same number of steps. With tensor > 1 XLA
        # places collectives of its own, so all shards take the same number of steps.
        axes = rules.axes_over("batch", self.mesh)
        if self.mesh.shape["tensor"] == 1:
            axes = tuple(axis for axis in axes if axis != "data")
        return jax.lax.pmax(alive.astype(jnp.int32), axes) > 0 if axes else alive

    def _decode_step(
        self,
        params: PyTree,
        ends: PyTree,
        pools: tuple[Array, ...],
        reads: ReadList,
        n: Array,
        lanes: tuple[Array, Array, Array],
        memory: tuple,
    ) -> tuple[Array, tuple]:
        """Feeds one token per lane through the model.

        Args:
          params: prepared parameters.
          ends: the embedding, the final norm and the output matrix, gathered.
          pools: `DecodeState.pools`.
          reads: the shard's read list.
          n: number of the decode step in the dispatch, from 0.
          lanes: (token_R, position_R, live_R).
          memory: (the dispatch's additions to the pools, scratch arrays of attention, `DecodeState.memories`).

        Returns:
          Final hidden states (R, 1, D), and the new `memory`.
        """
        model, alike, R = self.model, self.model.alike(), self.shape.lanes
        token_R, position_R, live_R = lanes
        rotary = decoder.rotations(model, position_R[:, None])
        routed = functools.partial(self._routed, real_BT=live_R[:, None])

        def layer_fn(
            x: Array, memory: tuple, layer: PyTree, info: decoder.LayerInfo, index: Array | int, kind: int
        ) -> tuple:
            added, scratches, memories = memory
            number = self._number[kind]
            if alike[kind].delta is not None:
                pair, place = self._memory_of(number, index)

                def mix(h_R1D: Array, layer: PyTree, project: delta.Project) -> tuple[Array, tuple[Array, Array]]:
                    whole = _of_kind(memories, pair)
                    at = [(place, *[0] * (m.ndim - 1)) for m in whole]
                    state, inputs = (
                        jax.lax.dynamic_slice(m, begin, (1, R, *m.shape[2:]))[0]
                        for m, begin in zip(whole, at, strict=True)
                    )
                    out, updated = delta.mix_one(h_R1D, layer, alike[kind], project, (state, inputs))
                    new = []
                    for m, begin, old, y in zip(whole, at, (state, inputs), updated, strict=True):
                        # A lane that no longer samples keeps its state, because a paused sample continues from it.
                        y = jnp.where(live_R.reshape(R, *[1] * (y.ndim - 1)), y, old)
                        new.append(jax.lax.dynamic_update_slice(m, y[None], begin))
                    return out, (new[0], new[1])

                x, new, route_R1k = decoder.block(x, layer, info, rotary[kind], alike[kind], mix, routed=routed)
                added = self._recorded(added, route_R1k, kind, index, n)
                return x, (added, scratches, _with_kind(memories, pair, new))

            (key, value), recents, scratch = _of_kind(pools, number), _of_kind(added, number), scratches[number]

            def attend(q_R1NH: Array, k_R1KH: Array, v_R1KH: Array, info: decoder.LayerInfo, sinks: tuple) -> tuple:
                new, at = recents, index
                if alike[kind].reuses_keys:
                    at = self._attending[number].num_layers - 1  # the last layer that computes its own keys
                else:
                    new = [
                        jax.lax.dynamic_update_slice(r, kv[None, :, 0, :, None], (index, 0, 0, n, 0))
                        for r, kv in zip(recents, (k_R1KH, v_R1KH), strict=True)
                    ]
                limits = {"window": info.window, "softcap": model.attn_softcap}
                recent = attention.recent_attention(q_R1NH[:, 0], new[0][at], new[1][at], n, sinks=sinks, **limits)
                if self.kernel:
                    limits |= {"tensor": self.mesh.shape["tensor"] > 1, "gpu": on_gpu(self.mesh)}
                    out = attention.kernel_attention(q_R1NH[:, 0], at, key, value, recent, reads, position_R, **limits)
                    return out[:, None], (tuple(new), scratch)
                out, used = attention.decode_attention(
                    q_R1NH[:, 0], at, key, value, recent, reads, scratch, position_R, **limits
                )
                return out[:, None], (tuple(new), used)

            x, (new, used), route_R1k = decoder.block(x, layer, info, rotary[kind], alike[kind], attend, routed=routed)
            added = self._recorded(_with_kind(added, number, new), route_R1k, kind, index, n)
            return x, (added, (*scratches[:number], used, *scratches[number + 1 :]), memories)

        token_R1 = token_R[:, None]
        x_R1D = decoder.embed(ends, token_R1, model, self.dtype)
        infos = decoder.layer_infos(model, decoder.per_layer_embeddings(ends, token_R1, x_R1D, model))
        x_R1D, memory = self._layers(params, infos, x_R1D, memory, layer_fn)
        return decoder.rms_norm(x_R1D, ends["final_norm"], model), memory

    def _recorded(
        self, added: tuple[Array, ...], route_RTk: Array | None, kind: int, index: Array | int, n: Array | int
    ) -> tuple[Array, ...]:
        """Writes a layer's routes of some tokens, from place `n` on, into the additions to pools (`added`)."""
        if not self.routes or route_RTk is None:
            return added
        *others, route_LR1Nk = added
        new = route_RTk.astype(route_LR1Nk.dtype)[None, :, None]
        place = self._first_routed[kind] + index
        return (*others, jax.lax.dynamic_update_slice(route_LR1Nk, new, (place, 0, 0, n, 0)))

    def _flush(self, pool_LMKCH: Array, recent_LRKNH: Array, reads: ReadList, live_R: Array) -> Array:
        """Writes the dispatch's keys, values or routes to pages; lanes that were not live write to the last page.

        NaN and infinity, which only a failed lane has, are replaced by finite numbers. A later owner of the page gives
        the weight 0 to keys that it does not see, but 0 x NaN would be NaN.
        """
        page_R = jnp.where(live_R, reads.write_page_R, self.shape.pages - 1)

        def write(r: Array, pool: Array) -> Array:
            block = jax.lax.dynamic_slice_in_dim(recent_LRKNH, r, 1, axis=1)
            block = jnp.nan_to_num(block) if jnp.issubdtype(block.dtype, jnp.inexact) else block
            return jax.lax.dynamic_update_slice(pool, block, (0, page_R[r], 0, reads.write_offset_R[r], 0))

        return jax.lax.fori_loop(0, self.shape.lanes, write, pool_LMKCH)

    # Prefill.

    def _prefill(self, bucket: int, params: PyTree, state: DecodeState, flat_BI: Int[Array, "B I"]) -> DecodeState:
        """Computes keys, values and memories of tokens, but no logits; `flat_BI` comes from `pack_chunks`."""
        model, s = self.model, self.shape
        J, C, B = s.max_pages, s.page_tokens, s.prefill_rows(bucket)
        length_B = begins_B = ends_B = jnp.zeros(B, jnp.int32)
        if s.slots:
            flat_BI, (length_B, begins_B, ends_B) = flat_BI[:, :-3], flat_BI[:, -3:].T
        tokens_BT, start_B, rest = flat_BI[:, :bucket], flat_BI[:, bucket], flat_BI[:, bucket + 1 :]
        prior = (rest[:, :J], rest[:, J : 2 * J], rest[:, 2 * J : 3 * J])
        targets_BJ, offset_B = rest[:, 3 * J : -1], rest[:, -1]
        longest = jnp.max(jnp.sum(prior[2] > 0, axis=1))
        position_BT = start_B[:, None] + jnp.arange(bucket)
        rotary = decoder.rotations(model, position_BT)
        ends = self._ends(params)
        # The chunk's keys and values, with a page of room before the chunk and room up to the end of the chunk's last
        # page, so that whole pages can be cut out of the array.
        pools, places, alike = state.pools, (1 + s.chunk_pages(bucket)) * C, model.alike()
        fresh = tuple(jnp.zeros((p.shape[0], B, p.shape[2], places, p.shape[4]), p.dtype) for p in pools)
        learned = tuple(jnp.zeros((m.shape[0], B, *m.shape[2:]), m.dtype) for m in state.memories)

        def layer_fn(
            x: Array, carry: tuple, layer: PyTree, info: decoder.LayerInfo, index: Array | int, kind: int
        ) -> tuple:
            (fresh, learned), number = carry, self._number[kind]
            if alike[kind].delta is not None:
                pair, place = self._memory_of(number, index)

                def mix(h_BTD: Array, layer: PyTree, project: delta.Project) -> tuple[Array, tuple[Array, Array]]:
                    old, inputs = (self._memory_at(m, place, begins_B) for m in _of_kind(state.memories, pair))
                    out, updated = delta.mix_on(h_BTD, layer, alike[kind], project, (old, inputs), length_B)
                    new = [m.at[place].set(y) for m, y in zip(_of_kind(learned, pair), updated, strict=True)]
                    return out, (new[0], new[1])

                x, new, route_BTk = decoder.block(x, layer, info, rotary[kind], alike[kind], mix, routed=self._routed)
                return x, (self._recorded(fresh, route_BTk, kind, index, C), _with_kind(learned, pair, new))

            key, value = _of_kind(pools, number)

            def attend(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, info: decoder.LayerInfo, sinks: tuple) -> tuple:
                new = tuple(
                    jax.lax.dynamic_update_slice(f, kv.swapaxes(1, 2)[None], (index, 0, 0, C, 0))
                    for f, kv in zip(_of_kind(fresh, number), (k_BTKH, v_BTKH), strict=True)
                )
                out = attention.prefill_attention(
                    q_BTNH, k_BTKH, v_BTKH, index, key, value, *prior, longest, position_BT,
                    window=info.window, softcap=model.attn_softcap, sinks=sinks,
                )  # fmt: skip
                return out, new

            x, new, route_BTk = decoder.block(x, layer, info, rotary[kind], alike[kind], attend, routed=self._routed)
            return x, (self._recorded(_with_kind(fresh, number, new), route_BTk, kind, index, C), learned)

        x_BTD = decoder.embed(ends, tokens_BT, model, self.dtype)
        infos = decoder.layer_infos(model, decoder.per_layer_embeddings(ends, tokens_BT, x_BTD, model))
        _, (fresh, learned) = self._layers(params, infos, x_BTD, (fresh, learned), layer_fn, with_keys=True)

        def write(i: Array, pool: Array, new_LBKTH: Array) -> Array:
            """Writes the chunk's part of one target page; places before the chunk's first token keep their content."""
            b, j = i % B, i // B
            at, page, size = j * C - offset_B[b], targets_BJ[b, j], (pool.shape[0], 1, *pool.shape[2:])
            block = jax.lax.dynamic_slice(new_LBKTH, (0, b, 0, at + C, 0), size)
            before = jax.lax.dynamic_slice(pool, (0, page, 0, 0, 0), size)
            block = jnp.where((at + jnp.arange(C) < 0)[:, None], before, block)
            return jax.lax.dynamic_update_slice(pool, block, (0, page, 0, 0, 0))

        used = jnp.max(jnp.sum(targets_BJ < s.pages - 1, axis=1))
        written = (
            jax.lax.fori_loop(0, used * B, lambda i, p, new=new: write(i, p, new), pool)
            for pool, new in zip(pools, fresh, strict=True)
        )

        def keep(b: Array, memory: Array, new_LB: Array) -> Array:
            new = jax.lax.dynamic_slice_in_dim(new_LB, b, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(memory, new, ends_B[b], axis=1)

        memories = (
            jax.lax.fori_loop(0, B, lambda b, m, new=new: keep(b, m, new), memory)
            for memory, new in zip(state.memories, learned, strict=True)
        )
        return dataclasses.replace(state, pools=tuple(written), memories=tuple(memories))

    # Memories of linear attention.

    def _memory_at(self, memory_LP: Array, index: Array | int, place_B: Array) -> Array:
        """Returns a layer's linear-attention memories, of shape (B, ...), from the places `place_B`.

        The place `EngineShape.nowhere`, which holds no sequence, gives zeros.
        """
        somewhere_B = place_B != self.shape.nowhere
        return jnp.where(somewhere_B.reshape(-1, *[1] * (memory_LP.ndim - 2)), memory_LP[index, place_B], 0)

    def copy_memories(self, state: DecodeState, copies_XI: np.ndarray) -> DecodeState:
        """Copies memories of linear attention from prompts to lanes; `EngineShape.pack_copies` makes `copies_XI`."""
        return self._copy_memory(state, self.put_rows(copies_XI))

    def _copy_memories(self, state: DecodeState, copies_XI: Int[Array, "1 I"]) -> DecodeState:
        number, from_R, to_R = jnp.split(copies_XI[0], [1, 1 + self.shape.lanes])

        def copy(memory: Array) -> Array:
            def body(i: Array, memory: Array) -> Array:
                block = jax.lax.dynamic_slice_in_dim(memory, from_R[i], 1, axis=1)
                block = jnp.where(from_R[i] == self.shape.nowhere, 0, block)
                return jax.lax.dynamic_update_slice_in_dim(memory, block, to_R[i], axis=1)

            return jax.lax.fori_loop(0, number[0], body, memory)

        return dataclasses.replace(state, memories=tuple(copy(memory) for memory in state.memories))

    def read_memories(self, state: DecodeState, place_X: np.ndarray) -> tuple[Array, ...]:
        """Makes device copies of the memories at one place of each shard; returns (L, X, ...) for each array."""
        return self._read_memory(state, self.put_rows(place_X))

    def write_memories(self, state: DecodeState, place_X: np.ndarray, *blocks: Array) -> DecodeState:
        """Overwrites the memories at one place of each shard with copies that `read_memories` made.

        Args:
          state: pools and lanes, donated.
          place_X: place to overwrite on each shard; `EngineShape.nowhere` leaves a shard unchanged.
          *blocks: the copies, (L, X, ...) of each array.
        """
        return self._write_memory(state, self.put_rows(place_X), *blocks)

    def _write_memories(self, state: DecodeState, place_1: Int[Array, " 1"], *blocks: Array) -> DecodeState:
        memories = tuple(m.at[:, place_1].set(block) for m, block in zip(state.memories, blocks, strict=True))
        return dataclasses.replace(state, memories=memories)

    # Spilling.

    def read_blocks(self, state: DecodeState, page_XJ: np.ndarray) -> tuple[Array, ...]:
        """Makes device copies of J pages of each shard; returns (L, X * J, K, C, H) for each pool."""
        return self._read(state, self.put_rows(page_XJ.reshape(-1)))

    def read_routes(self, state: DecodeState, page_XJ: np.ndarray) -> Array:
        """Makes a device copy of the routes (experts of each token) in J pages of each shard: (L, X * J, 1, C, k)."""
        return self._read_routes(state, self.put_rows(page_XJ.reshape(-1)))[0]

    def write_blocks(self, state: DecodeState, page_XJ: np.ndarray, *blocks: Array) -> DecodeState:
        """Overwrites J pages of each shard with copies that `read_blocks` made.

        Args:
          state: pools and lanes, donated.
          page_XJ: indices of the pages to overwrite; blocks to ignore go to the last page, whose content is never used.
          *blocks: the copies, (L, X * J, K, C, H) of each pool.
        """
        return self._write(state, self.put_rows(page_XJ.reshape(-1)), *blocks)

    def _write_pages(self, state: DecodeState, page_M: Int[Array, " J"], *blocks: Array) -> DecodeState:
        return dataclasses.replace(
            state, pools=tuple(pool.at[:, page_M].set(block) for pool, block in zip(state.pools, blocks, strict=True))
        )


def _of_kind(pools: tuple[Array, ...], kind: int) -> tuple[Array, Array]:
    """Returns pair number `kind` of arrays that are laid out as `DecodeState.pools` or `memories`."""
    return pools[2 * kind], pools[2 * kind + 1]


def _with_kind(pools: tuple[Array, ...], kind: int, new: tuple[Array, Array]) -> tuple[Array, ...]:
    """Replaces pair number `kind` of arrays that are laid out as `DecodeState.pools` or `memories`."""
    return (*pools[: 2 * kind], *new, *pools[2 * kind + 2 :])
