"""The programs of a job's rollout and of its weight move, ready to be compiled: arguments, and runs per step.

Loops of traced length (micro-batches, decode steps) count as in a step whose samples all have the planned length.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from podrl import offload
from podrl.engine.engine import Engine
from podrl.engine.sizes import engine_shape
from podrl.job.config import Job
from podrl.job.weights import Copies, copies, device_bytes, model_of, rollout_dtype, rollout_model
from podrl.learner.settings import PPOConfig
from podrl.mesh.build import make_mesh, spreads_copies
from podrl.mesh.rules import batch_shards
from podrl.models import delta, parameters
from podrl.models.config import ModelConfig
from podrl.models.hf_config import read_config
from podrl.models.moe import check_mesh
from podrl.models.sizes import (
    SIZES,
    config_of,
    expert_parameter_count,
    parameter_count,
    table_parameter_count,
)
from podrl.plan.chips import Topology
from podrl.plan.hlo import Trips
from podrl.rollout.worker import pieces_per_prompt
from podrl.storage import hub
from podrl.storage.storage import locate
from podrl.trainer import state as state_lib
from podrl.trainer.pack_shape import PackShape
from podrl.transfer.collective import CollectiveTransport
from podrl.transfer.local import RelayoutTransport
from podrl.transfer.plan import TransferPlan, make_plan
from podrl.types import JaxDevice, PyTree

TRAINER, ROLLOUT, BOTH = "trainer", "rollout", "both"


@dataclasses.dataclass(frozen=True)
class HandCountedWork:
    """Operations and bytes of HBM of one execution on a chip, counted by hand where loop lengths are traced."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a job, with its arguments and its runs per step.

    Attributes:
      name: name of the program in tables.
      side: side whose devices the program occupies: TRAINER, ROLLOUT or BOTH.
      lower: function that lowers the program; `compile()` is called on its result.
      runs: executions per training step.
      resident: bytes per chip of arrays that stay there while the program runs but are not its arguments.
      trips: trip counts of loops of traced length, see `podrl.plan.hlo.cost_of`.
      experts: number of experts of a layer on one chip; a grouped kernel reads the matrices of at most this many
        experts. 0 if the kernels get the experts of one layer only, or if the model has no experts.
      by_hand: counts of work to use instead of the counts from the compiled text; None uses the compiled text.
    """

    name: str
    side: str
    lower: Callable[[], Any]
    runs: float
    resident: float = 0.0
    trips: Trips = lambda depth: 1.0
    experts: int = 0
    by_hand: HandCountedWork | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """A job on two topologies.

    Attributes:
      job: configuration of the job.
      trainer, rollout: topology of each side; with `job.roles.colocated` both sides have the trainer's topology.
      completion: planned number of tokens of every completion.
    """

    job: Job
    trainer: Topology
    rollout: Topology
    completion: int

    @property
    def model(self) -> ModelConfig:
        """The model of the job."""
        return model_of(self.job)

    @property
    def reference(self) -> ModelConfig | None:
        """The model of the reference or teacher that the policy is compared with; None if there is neither.

        `model.reference` may name a published size here, as `model.size` does: no weights are read.
        """
        name = self.job.model.reference
        if not self.job.compares:  # `teachers` below have programs of their own
            return None
        if name in SIZES:
            return config_of(name)
        return read_config(locate(hub.local(name))) if name else self.model

    def reference_params(self, mesh: Mesh) -> PyTree | None:
        """Returns the shapes of the parameters that only the reference has, on a trainer mesh; None if there are none.

        With `trainer.offload='reference'` they are placed in the memory of the hosts. A moving average of the policy
        has the trainable parameters in float32; under adapters it shares the base.
        """
        model, teacher = self.reference, self.job.algo.distillation
        if teacher is not None and teacher.teacher == "ema":
            params = parameters.abstract_params(self.model, mesh, jnp.dtype("float32"))
            return parameters.split_trainable(params, self.model)[0]
        if model is None or (teacher is not None and teacher.teacher == "current"):
            return None
        if model.lora.rank and not self.job.model.reference:
            return None
        params = parameters.abstract_params(model, mesh, jnp.dtype(self.job.trainer.param_dtype))
        if not self.job.trainer.hosts_reference:
            return params
        return offload.tree_on_host(params, mesh, f"trainer.offload={self.job.trainer.offload!r}")

    def teachers(self) -> list[tuple[str, ModelConfig]]:
        """Returns the directory (or published size) and the model of each of `model.teachers`."""
        paths = [teacher.path for teacher in self.job.model.teachers]
        return [(path, config_of(path) if path in SIZES else read_config(locate(hub.local(path)))) for path in paths]

    @property
    def longest(self) -> int:
        return self.job.rollout.longest

    @property
    def critic(self) -> ModelConfig | None:
        """The model of PPO's critic; None for other algorithms."""
        if not isinstance(self.job.algo, PPOConfig):
            return None
        path = self.job.model.critic
        return (
            dataclasses.replace(read_config(locate(hub.local(path))), lora=self.job.model.lora) if path else self.model
        )

    def pack_shape(self, mesh: Mesh, more: int = 0) -> PackShape:
        """Returns the shape of an update's packed batch on a trainer mesh; every sequence gets `more` tokens more."""
        models = [self.model, self.reference, self.critic, *(teacher for _, teacher in self.teachers())]
        return self.job.pack_shape(mesh, more).read_by(models)

    def trainer_mesh(self) -> Mesh:
        mesh = self.job.roles.trainer.mesh
        check_mesh(self.model, mesh, key="roles.trainer.mesh")
        return make_mesh(mesh, self.trainer.devices(), key="roles.trainer.mesh")

    def rollout_mesh(self) -> Mesh:
        roles = self.job.roles
        topology = self.trainer if roles.colocated else self.rollout
        check_mesh(self.model, roles.rollout.mesh, key="roles.rollout.mesh")
        return make_mesh(roles.rollout.mesh, topology.devices(), key="roles.rollout.mesh", auto="data=-1")

    @property
    def rollout_model(self) -> ModelConfig:
        return rollout_model(self.job, self.model)

    def rollout_dtype(self) -> jnp.dtype:
        return rollout_dtype(self.job)

    def copies(self) -> Copies:
        return copies(self.job, self.trainer_mesh(), self.rollout_mesh())


def rollout_programs(setting: Setting) -> list[Program]:
    """Lists the programs of the engine, with their executions per training step."""
    job, model, mesh = setting.job, setting.rollout_model, setting.rollout_mesh()
    engine = _engine(setting, mesh)
    shards, shape = engine.shards, engine.shape
    params = parameters.abstract_params(model, mesh, setting.rollout_dtype())
    group, prompts = job.algo.num_generations, job.rollout.prompts_per_step
    pieces = prompts * pieces_per_prompt(prompts, group, shards)
    bucket = shape.buckets[-1]
    chunks = -(-job.rollout.max_prompt_length // bucket)
    prefills = math.ceil(pieces / shards / shape.prefill_rows(bucket)) * chunks
    lanes = min(shape.lanes * shards, job.samples_per_step)
    dispatches = math.ceil(job.samples_per_step / lanes) * math.ceil(setting.completion / shape.steps)
    runs = {f"prefill_{bucket}": prefills, "generate": dispatches, "insert": dispatches}
    prior = lambda depth: (chunks - 1) / 2  # noqa: E731 - mean number of earlier chunks that a chunk attends to
    policy = device_bytes(params)
    pools = 0.0
    programs = []
    for program in engine.programs(params):
        if program.name == "generate":
            pools = device_bytes(program.args[1])
        programs.append(
            Program(
                program.name.replace("_", " "),
                ROLLOUT,
                lambda program=program: program.jitted.lower(*program.args),
                runs.get(program.name, 0),
                resident=policy if engine.unrolled and program.name in ("generate", *runs) else 0.0,
                trips=(lambda depth: float(shape.steps) if depth == 0 else 1.0)
                if program.name == "generate"
                else prior,
                experts=local_experts(model, mesh),
                by_hand=_decode_work(setting, mesh, shape.steps, lanes / shards)
                if program.name == "generate"
                else None,
            )
        )
    aside = {"prepare": pools, "insert": policy, "spill": policy, "restore": policy}
    return [dataclasses.replace(p, resident=p.resident + aside.get(p.name, 0.0)) for p in programs]


def local_experts(model: ModelConfig, mesh: Mesh) -> int:
    """Counts the experts of a layer that lie on one device of a mesh; 0 for a model without experts."""
    return model.experts.count // mesh.shape.get("expert", 1) if model.experts is not None else 0


def _decode_work(setting: Setting, mesh: Mesh, steps: int, lanes: float) -> HandCountedWork:
    """Counts the work of a dispatch on a chip.

    A decode step reads the weights once, and each lane's keys and values once. Samples of a group that share a read of
    their prompt (`rollout.members_per_read`) read its keys and values together.

    The table of per-layer embeddings is not counted, because a token reads one row of it. Along the axis expert a chip
    reads and computes its own experts, for the lanes of all chips along the axis. States of linear attention are read
    and written once per step.
    """
    model, job = setting.rollout_model, setting.job
    tensor, spread = mesh.shape["tensor"], mesh.shape.get("expert", 1)
    item = setting.rollout_dtype().itemsize
    weights = (parameter_count(model) - table_parameter_count(model)) / tensor
    routed = expert_parameter_count(model) / tensor
    # Only the chosen experts compute a lane's token, and experts that no lane has chosen are not read.
    active = weights - routed * (1 - model.chosen_share)
    touched = weights - routed + routed / spread * (1 - (1 - model.chosen_share) ** (lanes * spread))
    part = lambda heads: heads if heads % tensor else heads // tensor  # noqa: E731  # uncut if they do not divide
    attends = [m for m in model.alike() if m.delta is None]
    token = sum(2 * m.num_layers * part(m.num_kv_heads) * m.head_dim for m in attends) * item
    prompt = job.rollout.max_prompt_length / min(job.algo.num_generations, job.rollout.members_per_read)
    seen = lanes * (prompt + setting.completion / 2)
    attended = lanes * (job.rollout.max_prompt_length + setting.completion / 2)
    attention = sum(4 * m.num_layers * m.num_heads / tensor * m.head_dim for m in attends) * attended
    states = inputs = 0
    for m in (m for m in model.alike() if m.delta is not None):
        state, read = (part(heads) * math.prod(rest) for heads, *rest in delta.memory_shapes(m))
        states, inputs = states + m.num_layers * state, inputs + m.num_layers * read
    linear = 7 * states * lanes  # two sums over the state, its decay, and its change
    # The factor 2 is for reading and writing states and inputs; states are float32.
    moved = 2 * lanes * (4 * states + item * inputs)
    return HandCountedWork(
        steps * (2 * active * lanes + attention + linear), steps * (touched * item + seen * token + moved)
    )


@dataclasses.dataclass(frozen=True)
class WeightMove:
    """The weight move of every step.

    Attributes:
      plan: transfer plan of the moved leaves.
      rate: bytes per second that one device sends.
      programs: programs of the largest bucket.
      buckets: number of buckets; a bucket of several parts counts once for each part.
      note: explanation, if a part of the move is not compiled; '' if the whole move is compiled.
    """

    plan: TransferPlan
    rate: float
    programs: tuple[Program, ...]
    buckets: int
    note: str

    @property
    def seconds(self) -> float:
        return self.plan.seconds(self.rate) if self.plan.moved_bytes else 0.0


def weight_move(setting: Setting) -> WeightMove:
    """Plans the move of `RLCluster.sync_weights`: all parameters, or only adapters that the rollout keeps apart."""
    trainer, rollout = setting.trainer, setting.rollout
    if setting.job.roles.colocated:
        return _colocated_move(setting)
    if trainer == rollout:
        devices = trainer.devices(copies=2)
        out = _Ends.of(setting, devices[: len(devices) // 2], devices[len(devices) // 2 :])
    else:
        out = _Ends.of(setting, trainer.devices(), _far(rollout, trainer))
    # The same move with the sides' slices exchanged, to compile the receiving programs: a program must have devices in
    # the first slice of its topology.
    back = _Ends.of(setting, _far(trainer, rollout), rollout.devices())
    buckets = out.transport.plan.buckets
    largest = max(range(len(buckets)), key=lambda n: buckets[n].bytes)
    sent, received = out.transport.programs[largest], back.transport.programs[largest]
    leaving, arriving = out.transport.arguments(largest), back.transport.arguments(largest)
    programs = [
        Program("move: pack", TRAINER, lambda: sent.pack.lower(*leaving["pack"]), 0, out.held),
        Program(
            "move: unpack",
            ROLLOUT,
            lambda: received.unpack.lower(*arriving["unpack"]),
            0,
            out.kept - out.successors(buckets[largest].leaves),
        ),
    ]
    note = "The crossing is planned but not compiled: one program spans both topologies, which differ."
    if trainer == rollout:
        most = max(out.held, out.kept)
        programs.append(Program("move: cross", BOTH, lambda: sent.cross.lower(*leaving["cross"]), 0, most))
        note = ""
    rate = min(trainer.chip.dcn_rate, rollout.chip.dcn_rate)
    return WeightMove(out.plan, rate, tuple(programs), sum(b.parts for b in buckets), note)


def _far(topology: Topology, other: Topology) -> list[JaxDevice]:
    """Lists devices of a topology with ids that no device of `other` has."""
    if topology.predicted:  # CPU devices, which all topologies count from 0
        (first,), (count,) = other.shape, topology.shape
        return jax.devices("cpu")[first : first + count]
    devices = topology.devices(copies=other.slices + 1)
    return devices[-(len(devices) // (other.slices + 1)) :]


def _colocated_move(setting: Setting) -> WeightMove:
    devices = setting.trainer.devices()
    ends = _Ends.of(setting, devices, devices, transport=False)
    plan, rate = ends.plan, setting.trainer.chip.ici_rate
    if not RelayoutTransport.fits(plan):
        return WeightMove(
            plan, rate, (), len(plan.buckets), "Copied between devices box by box: there is no large program."
        )
    bucket = max(plan.buckets, key=lambda b: b.bytes).leaves
    read = sum(device_bytes(ends.leaves[i]) for i in bucket)
    relayout = RelayoutTransport(plan, [leaf.sharding for leaf in ends.leaves], ends.places).program(bucket)
    program = Program(
        "move: relayout",
        BOTH,
        lambda: relayout.lower([ends.leaves[i] for i in bucket]),
        0,
        ends.held + ends.kept - read - ends.successors(bucket),
    )
    return WeightMove(plan, rate, (program,), len(plan.buckets), "")


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Source and target of the weight move, on chosen devices.

    Attributes:
      plan: transfer plan of the moved leaves.
      transport: programs that carry out the plan; None if they are not needed.
      leaves: shapes and shardings of the moved leaves at the source.
      places: shardings of the moved leaves at the target.
      held: bytes that a trainer chip holds, including the leaves that move.
      kept: bytes that a rollout chip holds: pools, and one copy of the policy, because every leaf is freed before its
        successor arrives.
    """

    plan: TransferPlan
    transport: Any
    leaves: list[jax.ShapeDtypeStruct]
    places: list[Sharding]
    held: float
    kept: float

    def successors(self, indices: Sequence[int]) -> float:
        """Counts the bytes of some leaves on a rollout chip; old and new leaves have the same size."""
        leaves = [(self.plan.leaves[i], self.places[i]) for i in indices]
        return sum(
            device_bytes(jax.ShapeDtypeStruct(leaf.shape, leaf.target_dtype, sharding=place)) for leaf, place in leaves
        )

    @classmethod
    def of(
        cls,
        setting: Setting,
        sources: Sequence[JaxDevice],
        targets: Sequence[JaxDevice],
        *,
        transport: bool = True,
    ) -> "_Ends":
        job, model, wire = setting.job, setting.model, setting.rollout_dtype()
        source = make_mesh(job.roles.trainer.mesh, sources, key="roles.trainer.mesh")
        target = make_mesh(job.roles.rollout.mesh, targets, key="roles.rollout.mesh", auto="data=-1")
        optimizer = job.trainer.optimizer()
        state, frozen = state_lib.abstract_state(model, optimizer, source, job.trainer.param_dtype)
        frozen = job.trainer.place_frozen(frozen, model.lora, source)
        params = parameters.abstract_params(setting.rollout_model, target, wire)
        moved, _ = parameters.split_trainable(params, setting.rollout_model)
        merged = setting.rollout_model != model
        sent = parameters.abstract_params(setting.rollout_model, source, wire) if merged else state.params
        shardings = jax.tree.map(lambda leaf: leaf.sharding, moved)
        plan = make_plan(sent, shardings, dtype=wire)
        leaves, places = jax.tree.leaves(sent), jax.tree.leaves(shardings)
        pools = next(p.args[0] for p in _engine(setting, target).programs(params) if p.name == "insert")
        return cls(
            plan,
            CollectiveTransport(plan, [leaf.sharding for leaf in leaves], places) if transport else None,
            leaves,
            places,
            device_bytes((state, frozen, setting.reference_params(source))) + (device_bytes(sent) if merged else 0.0),
            device_bytes(params) + device_bytes(pools),
        )


def _engine(setting: Setting, mesh: Mesh) -> Engine:
    shards, recurrent = batch_shards(mesh), setting.rollout_model.recurrent
    shape = engine_shape(setting.job.rollout, shards, recurrent=recurrent)
    several_hosts, kernel = spreads_copies(mesh), setting.job.rollout.page_kernel
    model, dtype = setting.rollout_model, setting.rollout_dtype()
    return Engine(model, mesh, shape, dtype, several_hosts=several_hosts, kernel=kernel)
