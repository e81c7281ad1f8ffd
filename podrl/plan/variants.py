"""Variants of a job's settings: options that save memory, and the meshes and batch splits that a search tries."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence

from podrl.mesh.chips import GIB
from podrl.mesh.rules import batch_shards
from podrl.plan.bounds import least_bytes, least_trainer_seconds
from podrl.plan.compile import CompileCache, CompileResult, measure
from podrl.plan.programs import (
    ROLLOUT,
    TRAINER,
    Program,
    Setting,
    rollout_programs,
    weight_move,
)
from podrl.plan.training import planned_rows, training_programs
from podrl.runtime.watchdog import announce_if_long

_STRONGER = {"none": "dots", "dots": "full", "full": "full", "offload": "full"}
_OF_A_STEP = ("trainer.remat=", "trainer.micro_batch_sequences=")
_TENSOR = (1, 2, 4, 8)
_WIDER = (16, 32, 64, 128)  # sizes of the axis tensor to try if the weights do not fit, or nearly fill, fewer chips
_SEQ = (1, 2, 4, 8, 16)
_EXPERT = (2, 4, 8)
MICRO_TRIES = 4


@dataclasses.dataclass(frozen=True)
class Variant:
    """A changed setting and the keys that change it, without '--config.'."""

    keys: tuple[str, ...]
    setting: Setting


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of quick compiles of one program, or of all programs of a side, for a variant.

    Attributes:
      keys: keys of the variant.
      program: name of the program that needs most memory.
      fits: True if every program fits; the compiler may refuse a program whose `missing` is 0.
      peak: bytes of a chip that this program needs, resident arrays included.
      missing: bytes by which a program does not fit; 0 if all fit.
      seconds: seconds of the programs in a step, at the roofline.
      at_least: True if the compiler named only a part of `peak` and `missing`.
    """

    keys: tuple[str, ...]
    program: str
    fits: bool
    peak: float
    missing: float
    seconds: float
    at_least: bool = False


def shortfall(found: Trial | CompileResult) -> str:
    """Describes in words by how much a program does not fit."""
    if not found.missing:
        return "refused by the compiler, which does not say by how many bytes"
    return f"{'at least ' if found.at_least else ''}{found.missing / GIB:.2f} GiB too much"


def programs_of(side: str, setting: Setting) -> list[Program]:
    """Lists the programs of one side."""
    return training_programs(setting) if side == TRAINER else rollout_programs(setting)


def helping(setting: Setting, failed: CompileResult) -> list[Trial]:
    """Tries each memory option alone on a program that does not fit; if none suffices, tries all options together.

    For a weight move only options that make it smaller are returned, and there may be none.
    """
    knobs = functools.partial(_knobs, failed)
    trials = [_try(variant, failed) for variant in knobs(setting)]
    if trials and not any(trial.fits for trial in trials):
        keys: tuple[str, ...] = ()
        together = setting
        for index in range(len(trials)):
            variants = list(knobs(together))
            if index < len(variants):
                keys, together = keys + variants[index].keys, variants[index].setting
        trials.append(_try(Variant(keys, together), failed))
    if _moves(failed):
        return [trial for trial in trials if trial.fits or trial.peak < failed.peak + failed.resident]
    return trials


def _moves(program: CompileResult) -> bool:
    return program.name.startswith("move")


def _knobs(failed: CompileResult, setting: Setting) -> Iterator[Variant]:
    """Lists the options of the sides that a program occupies; a weight move has no option that splits a training
    step."""
    if failed.side != ROLLOUT:
        for variant in _trainer_knobs(setting):
            if not (_moves(failed) and variant.keys[0].startswith(_OF_A_STEP)):
                yield variant
    if failed.side != TRAINER:
        yield from _rollout_knobs(setting)


def _try(variant: Variant, failed: CompileResult) -> Trial:
    programs = weight_move(variant.setting).programs if _moves(failed) else programs_of(failed.side, variant.setting)
    program = next((p for p in programs if p.name == failed.name), None)
    if program is None:  # with this variant the weights move in small pieces, without a large program
        return Trial(variant.keys, failed.name, True, 0.0, 0.0, 0.0)
    return _trial(variant.keys, [measure(program, _chip(variant.setting, failed.side), quick=True)])


def _trial(keys: tuple[str, ...], measured: Sequence[CompileResult]) -> Trial:
    """Makes a trial of measured programs: whether all fit, the memory of the largest, and the seconds of all."""
    worst = max(measured, key=lambda m: (not m.fits, m.peak + m.resident))
    return Trial(
        keys,
        worst.name,
        all(m.fits for m in measured),
        worst.peak + worst.resident,
        max(m.missing for m in measured),
        sum(m.seconds * m.runs for m in measured),
        any(m.at_least for m in measured),
    )


def _chip(setting: Setting, side: str):
    return (setting.rollout if side == ROLLOUT and not setting.job.roles.colocated else setting.trainer).chip


def _training(setting: Setting, **changes: object) -> Setting:
    job = setting.job
    return dataclasses.replace(
        setting, job=dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, **changes))
    )


def _decoding(setting: Setting, **changes: object) -> Setting:
    job = setting.job
    return dataclasses.replace(
        setting, job=dataclasses.replace(job, rollout=dataclasses.replace(job.rollout, **changes))
    )


def _meshed(setting: Setting, side: str, mesh: str) -> Setting:
    roles = setting.job.roles
    role = dataclasses.replace(getattr(roles, side), mesh=mesh)
    job = dataclasses.replace(setting.job, roles=dataclasses.replace(roles, **{side: role}))
    return dataclasses.replace(setting, job=job)


def _trainer_knobs(setting: Setting) -> Iterator[Variant]:
    training, mesh = setting.job.trainer, setting.trainer_mesh()
    if (remat := _STRONGER[training.remat]) != training.remat:
        yield Variant((f"trainer.remat={remat}",), _training(setting, remat=remat))
    rows = setting.job.pack_shape(mesh).rows
    if rows > batch_shards(mesh):
        size = _sequences(setting, rows // 2)
        yield Variant(
            (f"trainer.micro_batch_sequences={size}",),
            _training(
                setting, micro_batch_sequences=size, train_micro_batch_size=None, gradient_accumulation_steps=None
            ),
        )
    if mesh.shape["fsdp"] < mesh.size:
        yield Variant(("roles.trainer.mesh=fsdp=-1",), _meshed(setting, "trainer", "fsdp=-1"))
    if "float32" in (training.mu_dtype, training.nu_dtype):
        keys = ("trainer.mu_dtype=bfloat16", "trainer.nu_dtype=bfloat16")
        yield Variant(keys, _training(setting, mu_dtype="bfloat16", nu_dtype="bfloat16"))
    if not setting.model.lora.rank:
        lora = dataclasses.replace(setting.job.model.lora, rank=16)
        model = dataclasses.replace(setting.job.model, lora=lora)
        job = dataclasses.replace(setting.job, model=model)
        yield Variant(("model.lora.rank=16",), dataclasses.replace(setting, job=job))


def _rollout_knobs(setting: Setting) -> Iterator[Variant]:
    rollout, mesh = setting.job.rollout, setting.rollout_mesh()
    if setting.rollout_dtype() != "bfloat16":
        yield Variant(("rollout.data_type=bfloat16",), _decoding(setting, data_type="bfloat16"))
    shards = batch_shards(mesh)
    if rollout.lanes > shards:
        lanes = max(shards, rollout.lanes // 2)
        yield Variant((f"rollout.lanes={lanes}",), _decoding(setting, lanes=lanes))
    tensor = 2 * mesh.shape["tensor"]
    if mesh.size % tensor == 0 and setting.model.num_heads % tensor == 0:
        spec = f"data={mesh.size // tensor},tensor={tensor}"
        yield Variant((f"roles.rollout.mesh={spec}",), _meshed(setting, "rollout", spec))


def _sequences(setting: Setting, rows: int) -> int:
    """Computes the trainer.micro_batch_sequences that makes micro-batches of `rows` rows."""
    return rows * max(1, setting.job.pack_shape(setting.trainer_mesh()).tokens // setting.longest)


def search(
    setting: Setting,
    *,
    log: Callable[[str], None],
    known: CompileCache | None = None,
    leads: MutableMapping[str, str] | None = None,
) -> tuple[Setting, list[Trial]]:
    """Searches for the fastest meshes, micro-batches and remat policies that fit, by quick compiles.

    Trainer and rollout are searched one after the other. For each mesh and remat policy the largest micro-batch that
    fits is taken; the policy 'none' begins with the micro-batch that fitted with 'dots'. A trial ends with the first
    program that does not fit. The policy 'full' comes last, and is left out if its matrix products alone take longer
    than the fastest trial so far.

    Args:
      setting: the job and its topologies.
      log: function that is called with the largest possible number of trials, then with a line per trial.
      known: measurements so far, see `podrl.plan.compile.measure`.
      leads: mapping to which the search writes each side's best trial so far, as text.

    Returns:
      (the setting with the best trial of each side, all trials). A side without a trial that fits keeps its settings.
    """
    sides = {TRAINER: list(_trainer_candidates(setting)), ROLLOUT: list(_rollout_candidates(setting))}
    most = {side: sum(len(group.variants) for group in groups) for side, groups in sides.items()}
    log(
        f"search: at most {sum(most.values())} trials: trainer {most[TRAINER]} ({len(sides[TRAINER])} meshes and remat "
        f"policies, up to {MICRO_TRIES} micro-batches each), rollout {most[ROLLOUT]} meshes"
    )
    if counted := _counted_best(setting, sides[TRAINER]):
        log(f"search: {counted}")
    trials: list[Trial] = []
    best, leads = setting, {} if leads is None else leads
    for side in sides:
        # The rollout's candidates are made after the trainer's search, because their weights come from the trainer's
        # new mesh.
        groups = _in_order(sides[side]) if side == TRAINER else _rollout_candidates(best)
        found: list[tuple[float, Setting]] = []
        fitting: list[str] = []
        # By mesh: index of the micro-batch that fitted with the previous policy. The previous policy needs less memory
        # than this one, so no larger micro-batch can fit now.
        reached: dict[str, int] = {}
        left = most[side]
        for group in groups:
            left -= len(group.variants)
            start = 0 if group.last else reached.get(group.mesh, 0)
            if group.spare_of is not None and any(mesh.startswith(group.spare_of) for mesh in fitting):
                continue
            if group.last and found and _too_slow(group, least := min(pair[0] for pair in found)):
                log(f"{side}: {' '.join(group.variants[0].keys[:2])}: slower than {least:.3g} s, counted")
                if least_bytes(side, group.variants[-1].setting) <= _chip(setting, side).hbm:
                    fitting.append(group.family)
                continue
            reached[group.mesh] = len(group.variants)
            for index, variant in enumerate(group.variants[start:], start):
                with announce_if_long(f"{side}: {' '.join(variant.keys)}: compiling", log):
                    trial = _total(side, variant, known)
                trials.append(trial)
                verdict = f"{trial.seconds:.3g} s" if trial.fits else shortfall(trial)
                rest = left if trial.fits else left + len(group.variants) - 1 - index
                if trial.fits and (not found or trial.seconds < min(pair[0] for pair in found)):
                    leads[side] = f"{trial.seconds:.3g} s with {' '.join(trial.keys)}"
                log(
                    f"{side}: {' '.join(trial.keys)}: peak {trial.peak / GIB:.2f} GiB ({trial.program}), {verdict}; "
                    f"at most {rest} trials left; best so far: {leads.get(side, 'nothing fits yet')}"
                )
                if trial.fits:
                    found.append((trial.seconds, variant.setting))
                    fitting.append(group.family)
                    reached[group.mesh] = index
                    break
        if found:
            winner = min(found, key=lambda pair: pair[0])[1].job
            roles = dataclasses.replace(best.job.roles, **{side: getattr(winner.roles, side)})
            job = dataclasses.replace(
                best.job, roles=roles, trainer=winner.trainer if side == TRAINER else best.job.trainer
            )
            best = dataclasses.replace(best, job=job)
    return _in_own_keys(setting, best), trials


def _counted_best(setting: Setting, groups: Sequence["_Group"]) -> str:
    """Names the trainer's mesh that is fastest by counting alone, without a compile, among meshes that may fit."""
    chip, found = _chip(setting, TRAINER), []
    for group in groups:
        variant = group.variants[0]
        if variant.setting.job.trainer.remat == "dots" and least_bytes(TRAINER, variant.setting) <= chip.hbm:
            found.append((least_trainer_seconds(variant.setting), " ".join(variant.keys)))
    if not found:
        return "counted, nothing compiled yet: no mesh holds its largest micro-batch with remat=dots"
    return f"counted, nothing compiled yet: the trainer takes at least {min(found)[0]:.3g} s, with {min(found)[1]}"


def _in_own_keys(before: Setting, after: Setting) -> Setting:
    """Expresses the micro-batch that a search found by the key that the configuration uses, if this key can express
    the size."""
    size, group = after.job.trainer.micro_batch_sequences, after.job.group_size
    if before.job.trainer.train_micro_batch_size and size and size % group == 0:
        return _training(after, micro_batch_sequences=None, train_micro_batch_size=size // group)
    return after


def _in_order(groups: Sequence["_Group"]) -> list["_Group"]:
    """Orders groups: first the groups that are always tried, with the groups marked `last` at their end; then the
    spare groups, mesh by mesh."""
    return sorted(groups, key=lambda group: 2 if group.spare_of is not None else int(group.last))


def _too_slow(group: "_Group", seconds: float) -> bool:
    return min(least_trainer_seconds(variant.setting) for variant in group.variants) > seconds


def differences(before: Setting, after: Setting) -> list[str]:
    """Lists, as 'KEY=VALUE', the keys of meshes, remat and micro-batches in which a found setting differs."""
    keys = []
    for side in (TRAINER, ROLLOUT):
        mesh = getattr(after.job.roles, side).mesh
        if mesh != getattr(before.job.roles, side).mesh:
            keys.append(f"roles.{side}.mesh={mesh}")
    sizes = ("train_micro_batch_size", "micro_batch_sequences", "gradient_accumulation_steps", "max_seq_token_per_tpu")
    for name in ("remat", *sizes):
        value = getattr(after.job.trainer, name)
        if value != getattr(before.job.trainer, name):
            keys.append(f"trainer.{name}={value}")
    return keys


def _total(side: str, variant: Variant, known: CompileCache | None = None) -> Trial:
    """Compiles a side's programs, for the rollout also its part of the weight move, until one does not fit.

    Programs that never run in a step are left out, except those that run when the pool is short of pages.

    The trial has the memory of the largest program, and the seconds of all compiled programs.

    Nothing is compiled if the lower bound of the side's bytes is already too large.
    """
    chip = _chip(variant.setting, side)
    if (least := least_bytes(side, variant.setting)) > chip.hbm:
        return Trial(variant.keys, "counted, not compiled", False, least, least - chip.hbm, 0.0, at_least=True)
    measured: list[CompileResult] = []
    rare = ("spill", "restore")  # these programs run only when the pool is short of pages
    programs = [program for program in programs_of(side, variant.setting) if program.runs or program.name in rare]
    if side == ROLLOUT:
        programs += [program for program in weight_move(variant.setting).programs if program.side == ROLLOUT]
    for program in programs:
        measured.append(measure(program, chip, quick=True, known=known))
        if not measured[-1].fits:
            break
    return _trial(variant.keys, measured)


def _tensors(setting: Setting, devices: int) -> Sequence[int]:
    heads = {count for alike in setting.model.alike() for count in (alike.num_heads, alike.num_kv_heads)}
    return [n for n in _TENSOR if devices % n == 0 and all(count % n == 0 for count in heads)]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Variants of one mesh and one remat policy, in order: the first that fits is the best.

    Attributes:
      variants: variants with micro-batches from the largest down.
      mesh: mesh of all variants.
      family: name of the kind of mesh.
      spare_of: beginning of the names of some families: if a mesh of one of them fits, this group is not tried. None
        for a group that is always tried.
      last: True if the group is tried after the other groups that are always tried, because its policy keeps the fewest
        values and takes the longest time.
    """

    variants: tuple[Variant, ...]
    mesh: str
    family: str
    spare_of: str | None = None
    last: bool = False


def _trainer_candidates(setting: Setting) -> Iterator[_Group]:
    """Lists, for each mesh and remat policy, micro-batches from the largest down.

    Rows are cut along time (`seq`) in two cases: there are fewer rows than shards, or nothing fits with less cutting.
    Experts are also tried spread over the axis expert. If there are several slices, each holds a copy of the weights;
    they share one copy if nothing else fits.
    """
    slices = setting.trainer.slices
    devices = len(setting.trainer.devices()) // slices
    for shared in (False, True) if slices > 1 else (False,):
        copies, chips = (1, devices * slices) if shared or slices == 1 else (slices, devices)
        for tensor in _tensors(setting, devices):
            family, filled = f"{'shared' if shared else 'own'} tensor={tensor} ", False
            cuts = [(n, 1) for n in _SEQ] + [(1, n) for n in _experts(setting)]
            for seq, expert in (cut for cut in cuts if devices // tensor % math.prod(cut) == 0):
                fsdp = chips // tensor // seq // expert
                sizes = {"data": copies, "expert": expert, "fsdp": fsdp, "seq": seq, "tensor": tensor}
                spec = ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis == "fsdp")
                meshed = _meshed(setting, "trainer", spec)
                try:
                    rows, shards = planned_rows(meshed), batch_shards(meshed.trainer_mesh())
                except ValueError:  # the configuration fixes a row length that this size of seq does not divide
                    continue
                spare = "" if shared else family if filled and expert == 1 else None
                for remat in ("dots", "none", "full"):
                    keys = (f"roles.trainer.mesh={spec}", f"trainer.remat={remat}")
                    yield _Group(tuple(_split(meshed, keys, remat)), spec, family, spare, last=remat == "full")
                filled = rows >= shards


def _experts(setting: Setting) -> list[int]:
    """Lists the sizes above 1 to try for the mesh axis expert.

    Beyond the number of experts that a token chooses, gathering all tokens costs more bytes than sending each token to
    its experts, so larger sizes are not tried.
    """
    experts = setting.model.experts
    return [n for n in _EXPERT if experts is not None and n <= experts.chosen and experts.count % n == 0]


def _split(setting: Setting, keys: tuple[str, ...], remat: str) -> Iterator[Variant]:
    shards = batch_shards(setting.trainer_mesh())
    per_row = max(1, setting.job.pack_shape(setting.trainer_mesh()).tokens // setting.longest)
    rows = math.ceil(setting.job.mini_batch_size / per_row / shards) * shards
    for _ in range(MICRO_TRIES):
        size = rows * per_row
        changed = _training(
            setting,
            remat=remat,
            micro_batch_sequences=size,
            train_micro_batch_size=None,
            gradient_accumulation_steps=None,
            max_seq_token_per_tpu=None,
        )
        yield Variant((*keys, f"trainer.micro_batch_sequences={size}"), changed)
        if rows == shards:
            return
        rows = max(shards, rows // 2 // shards * shards)


def _rollout_candidates(setting: Setting) -> Iterator[_Group]:
    topology = setting.trainer if setting.job.roles.colocated else setting.rollout
    devices = len(topology.devices())
    narrow = _tensors(setting, devices)
    wider = [n for n in _WIDER if devices % n == 0 and setting.model.num_heads % n == 0]
    crowded = False  # True if weights on fewer chips would leave little room for keys and values
    for tensor in (*narrow, *wider):
        spec = f"data={devices // tensor}" + (f",tensor={tensor}" if tensor > 1 else "")
        variant = Variant((f"roles.rollout.mesh={spec}",), _meshed(setting, "rollout", spec))
        yield _Group((variant,), spec, "", None if tensor in narrow or crowded else "")
        crowded = least_bytes(ROLLOUT, variant.setting) > topology.chip.hbm / 2
    for expert in (n for n in _experts(setting) if devices % n == 0):
        spec = f"data={devices // expert},expert={expert}"
        yield _Group((Variant((f"roles.rollout.mesh={spec}",), _meshed(setting, "rollout", spec)),), spec, "")
