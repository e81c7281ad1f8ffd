"""The command that writes a run's model as a Hugging Face directory.

    python -m podrl.export --workdir=RUN --out=DIR [--step=N] [--adapter] [--dtype=bfloat16] [--push=ORG/NAME]

DIR loads in `transformers`. LoRA adapters are merged into the weights; with --adapter, only the adapters are written,
and DIR loads in `peft` on top of the base model.
"""

import os

from podrl.runtime import environment, signals

# This block precedes the slow imports below, so that signals are handled meanwhile, and jax finds the environment set.
if __name__ == "__main__":
    signals.leave_on_signals(
        unwind=False, words=lambda: "before the directory was written; the same command starts again."
    )
    environment.prepare(os.environ, fake_devices=0)

import argparse
import dataclasses
import json
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from podrl.data import shape
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import KINDS, SCRATCH, ModelSource, ScratchModel
from podrl.mappings import ConfigValues, JsonObject
from podrl.mesh import build
from podrl.models import hf_load, hf_save, lora, orbax_files, parameters, peft_files, scalar
from podrl.models.config import LoraConfig, ModelConfig
from podrl.models.hf_config import config_to_hf, read_config
from podrl.rundir import identity
from podrl.rundir.card import card
from podrl.runtime.arguments import Parser, as_sentence, write_line
from podrl.runtime.watchdog import announce_if_long
from podrl.storage import hub
from podrl.storage.record import CheckpointRecord
from podrl.storage.storage import Place, StorageError, absolute, check, complete_steps, is_remote, locate
from podrl.types import PyTree

_log = logging.getLogger("podrl.export")


def export_params(
    config: ModelConfig,
    params: PyTree,
    tokenizer_dir: str | Place,
    out: str | pathlib.Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    prompts: JsonObject | None = None,
) -> None:
    """Writes weights with merged adapters, config.json and tokenizer files to `out`, all of them or none.

    Args:
      config: configuration of the model.
      params: weights of the model, with or without adapters; the weights of a reward model have the leaf `score`.
      tokenizer_dir: directory of the tokenizer, whose files are copied; its token ids are written to config.json.
      out: directory to write, which must not exist or must be empty.
      dtype: dtype of the written weights.
      prompts: settings with which the run made prompts from questions, written to prompts.json for podrl.generate; None
        writes no such file.

    Raises:
      ValueError: `out` is not empty.
    """
    tokenizer = Tokenizer(tokenizer_dir)
    head = {scalar.HEAD: params[scalar.HEAD]} if scalar.HEAD in params else {}
    if config.lora.rank:
        config, params = lora.merge({name: leaf for name, leaf in params.items() if name not in head}, config)
        params = {**params, **head}
    ids: dict[str, object] = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    texts = {name: (tokenizer.directory / name).read_bytes() for name in tokenizer.files}
    generation = json.loads(texts.get("generation_config.json", "{}"))
    generation = {**(generation or {name: i for name, i in ids.items() if i is not None})} | {
        "eos_token_id": list(tokenizer.eos_ids)
    }
    texts["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
    if prompts is not None:
        texts[shape.PROMPTS_FILE] = (json.dumps(prompts, indent=2) + "\n").encode()
    wanted = None
    if head:
        (causal,) = config_to_hf(config)["architectures"]
        ids |= {"architectures": [causal.replace("ForCausalLM", "ForSequenceClassification")]}
        ids |= {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}
        wanted = scalar.stored_entries(config)
    hf_save.save(out, config, params, dtype=dtype, fields=ids, extra_files=texts, wanted=wanted)


def restore_params(workdir: Place, step: int | None, abstract: PyTree) -> tuple[int, PyTree]:
    """Restores the trained parameters of a run's checkpoint bit for bit, without the optimizer state.

    Args:
      workdir: directory of the run, which may still be training.
      step: step of the checkpoint; None takes the newest checkpoint that is not damaged.
      abstract: shapes, dtypes and shardings of the trained parameters.

    Returns:
      (step, parameters).

    Raises:
      ValueError: the run has no such checkpoint (the message lists its checkpoints), or the checkpoint cannot be read.
    """
    directory = absolute(workdir / "checkpoints")
    steps = complete_steps(directory)
    if not steps or (step is not None and step not in steps):
        wanted = "any step" if step is None else f"step {step}"
        raise ValueError(f"{directory} has no checkpoint of {wanted}: it has {steps or 'none'}.")
    problems = []
    for chosen in reversed(steps) if step is None else [step]:
        folder = directory / str(chosen)
        try:
            record = CheckpointRecord.read(folder)
            params = orbax_files.read_leaves(folder / "state", {"params": abstract})
            record.check_state(params["params"], "params/")
        except ValueError as error:
            problems.append(f"Checkpoint {folder} cannot be read: {error}")
            _log.warning("%s", problems[-1])
            continue
        return chosen, params["params"]
    raise ValueError(" ".join(problems[:1] if step is None else problems))


@dataclasses.dataclass(frozen=True)
class RunModel:
    """The model that a run trained, as read from the run's config.json.

    Attributes:
      config: configuration of the model, including adapters.
      base: directory of the weights from which training started; None for a model trained from scratch.
      tokenizer: directory of the model's tokenizer.
      dtype: name of the dtype of the trained parameters.
      scores: True if the model is a reward model.
      prompts: settings of `data` with which the run made prompts from questions; None if the run's sources have
        different settings, or if the settings are not recorded.
    """

    config: ModelConfig
    base: Place | None
    tokenizer: Place
    dtype: str
    scores: bool = False
    prompts: JsonObject | None = None


def read_run(workdir: Place) -> RunModel:
    """Reads the description of a run directory's model from its config.json.

    Raises:
      ValueError: `workdir` is not a run directory, or the model of its run was a Python object, not a directory.
    """
    raw = identity.read(workdir, absolute(workdir / "checkpoints"))
    if raw is None:
        raise ValueError(f"--workdir={workdir} has no config.json: give the directory of a run of podrl.launch.")
    try:
        return _run_model(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{workdir}/config.json was not written by podrl.launch ({type(error).__name__}: {error}): give the "
            "directory of a run."
        ) from error


def _run_model(raw: ConfigValues) -> RunModel:
    if not raw["model"]["path"]:
        raise ValueError(
            "The run got its model as a Python object, so config.json names no model.path: train with actor=DIRECTORY "
            "or podrl.from_pretrained(DIRECTORY), or write the weights with podrl.export.export_params."
        )
    adapters = LoraConfig(**raw["model"]["lora"])
    dtype = raw["trainer"]["param_dtype"]
    source = ModelSource(raw["model"]["path"])
    tokenizer = source.tokenizer(raw.get("tokenizer", ""))
    scores = (name := raw.get("algorithm", "")) in KINDS and KINDS[name].scores
    prompts = _prompts(raw.get("data"))
    if source.path == SCRATCH:
        config = ScratchModel(**raw["scratch"]).model(Tokenizer(tokenizer).vocab_size)
        return RunModel(dataclasses.replace(config, lora=adapters), None, tokenizer, dtype, scores, prompts)
    base = source.directory
    return RunModel(dataclasses.replace(read_config(base), lora=adapters), base, tokenizer, dtype, scores, prompts)


def _prompts(data: ConfigValues | None) -> JsonObject | None:
    """Returns the settings with which a run made prompts.

    Returns None if the run's sources have different settings, or if its config.json has no section `data`.
    """
    if data is None:
        return None
    names = ("system_prompt", "template", "question_field")

    def of(source: ConfigValues, name: str) -> str:
        inherits = "auto" if name == "system_prompt" else ""
        value = source.get(name, inherits)
        return data.get(name, "") if value == inherits else value

    first, *others = [{name: of(source, name) for name in names} for source in data.get("sources") or [data]]
    if any(one != first for one in others):
        return None
    return first | {"system_prompt": "" if first["system_prompt"] == "auto" else first["system_prompt"]}


def load_run(workdir: Place, step: int | None = None) -> tuple[RunModel, int, PyTree]:
    """Loads a run's checkpoint onto all devices of this process.

    Args:
      workdir: directory of the run.
      step: step of the checkpoint; None takes the newest checkpoint that is not damaged.

    Returns:
      (description of the model, step, whole parameter tree with the base weights).

    Raises:
      ValueError: there is no such run or checkpoint, or the frozen weights are lost: they were random, and are in no
        checkpoint.
    """
    run = read_run(workdir)
    mesh = build.make_mesh("fsdp=-1", jax.local_devices())
    kind: Any = scalar if run.scores else parameters
    trainable, frozen = kind.split_trainable(kind.abstract_params(run.config, mesh, jnp.dtype(run.dtype)), run.config)
    step, params = restore_params(workdir, step, trainable)
    if run.config.lora.rank:
        if run.base is None:
            raise ValueError(f"{workdir} trained adapters on random weights: there is no base model to put them on.")
        # Loads the base weights as in training, rounded if lora.base_dtype is set. `load` also makes new adapters; the
        # trained adapters replace them below.
        _, base = hf_load.load(run.base, mesh, jnp.dtype(run.dtype), run.config.lora)
        params = kind.join_trainable(params, base)
    elif frozen:
        if run.base is None:
            raise ValueError(
                f"{workdir} began with random weights, and its checkpoint lacks the frozen weights: they are lost."
            )
        _, base = hf_load.load(run.base, mesh, jnp.dtype(run.dtype))
        params = kind.join_trainable(params, parameters.split_trainable(base, run.config)[1])
    return run, step, params


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; see the module's docstring."""
    parser = Parser("podrl.export", __doc__)
    parser.add_argument("--workdir", required=True, help="directory of the run, as passed to podrl.launch")
    parser.add_argument("--out", required=True, help="directory to write; must be new or empty")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapters, in PEFT's layout")
    parser.add_argument("--dtype", default="bfloat16", choices=hf_save.DTYPES, help="dtype of the written weights")
    parser.add_argument(
        "--push", default="", metavar="ORG/NAME", help="also upload the directory to the hub, with a model card"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> str:
    """Exports as the command line says, and returns one line that describes the export.

    Raises:
      SystemExit: a user error; the message is one line.
    """
    args = parse(argv)
    try:
        check(args.workdir, "--workdir")
        if is_remote(args.out):
            raise ValueError(f"--out={args.out}: give a local directory, then copy it to the bucket.")
        hf_save.refuse_existing(args.out)
        if args.adapter:
            peft_files.adapter_entries(read_run(locate(args.workdir)).config)
        with announce_if_long(f"Reading {args.workdir}", write_line):
            run, step, params = load_run(locate(args.workdir), args.step)
        dtype = jnp.dtype(args.dtype)
        out = pathlib.Path(args.out)
        with announce_if_long(f"Writing {out}", write_line):
            if args.adapter:
                peft_files.save_adapters(out, run.config, params, base=str(run.base), dtype=dtype)
            else:
                export_params(run.config, params, run.tokenizer, out, dtype=dtype, prompts=run.prompts)
        pushed = ""
        if args.push:
            place = absolute(args.workdir)
            config = identity.read(place, place / "checkpoints") or {}
            (out / "README.md").write_text(card(place, config, step))
            pushed = f" It was uploaded: {hub.push(out, args.push)}."
    except (ValueError, OSError, ImportError, StorageError) as error:
        raise SystemExit(f"podrl.export: error: {as_sentence(error)}") from None
    return f"Step {step} of {args.workdir} was written to {args.out} ({args.dtype}).{pushed}"


if __name__ == "__main__":
    sys.stdout.write(main() + "\n")
