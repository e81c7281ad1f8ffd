"""Exports the models of run directories that have the files of a training run."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl import evaluate, export, generate
from podrl.data.shape import PROMPTS_FILE
from podrl.data.tokenizer import Tokenizer
from podrl.job.config import TINY, ModelSource
from podrl.models import LoraConfig, from_pretrained, parameters
from podrl.storage.checkpoint import Checkpoints
from podrl.trainer.config import RLTrainingConfig
from podrl.types import TrainState

pytestmark = pytest.mark.usefixtures("quick_compilation")

LORAS = {
    "tiny": LoraConfig(),
    "lora": LoraConfig(rank=16),
    "int8": LoraConfig(rank=4, pattern="q|v", base_dtype="int8"),
}
TOKENS_BT = np.random.default_rng(0).integers(0, 384, (2, 16)).astype(np.int32)


def make_run(workdir, variant: str, steps=(3,)):
    """Makes a run directory with checkpoints after `steps`; returns the checkpoints' models by step."""
    source = ModelSource(lora=LORAS[variant])
    settings = {"model": source, "trainer": RLTrainingConfig(eval_every_n_steps=0, max_steps=9)}
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps({k: dataclasses.asdict(v) for k, v in settings.items()}))
    models = {}
    checkpoints = Checkpoints(workdir / "checkpoints", keep=len(steps))
    for step in steps:
        model = from_pretrained(TINY, lora=source.lora)
        changed = jax.tree.map(lambda x, step=step: x + 0.005 * step, model.params)
        trainable, frozen = parameters.split_trainable(changed, model.config)
        trainable, frozen = (
            (trainable, parameters.split_trainable(model.params, model.config)[1]) if frozen else (changed, {})
        )
        state = TrainState(trainable, {"mu": jax.tree.map(jnp.zeros_like, trainable)}, jnp.int32(step))
        checkpoints.save(step, state, {"step": step}, {})
        models[step] = type(model)(model.config, parameters.join_trainable(trainable, frozen), model.mesh)
    checkpoints.close()
    return models


@pytest.mark.parametrize("variant", ["tiny", "lora", "int8"])
def test_the_exported_model_is_the_checkpoint(tmp_path, variant):
    models = make_run(tmp_path / "run", variant, steps=(3, 5))
    line = export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--dtype=float32"])
    assert line.startswith("Step 5 of")
    again = from_pretrained(tmp_path / "out")
    assert again.config == dataclasses.replace(models[5].config, lora=LoraConfig())
    np.testing.assert_allclose(
        np.asarray(again(TOKENS_BT)), np.asarray(models[5].merged()(TOKENS_BT)), atol=2e-5, rtol=0
    )
    before = from_pretrained(TINY)
    assert np.abs(np.asarray(again(TOKENS_BT)) - np.asarray(before(TOKENS_BT))).max() > 1e-2
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out3'}", "--dtype=float32", "--step=3"])
    third = from_pretrained(tmp_path / "out3")
    np.testing.assert_allclose(
        np.asarray(third(TOKENS_BT)), np.asarray(models[3].merged()(TOKENS_BT)), atol=2e-5, rtol=0
    )


def test_a_run_is_evaluated_by_its_newest_checkpoint(tmp_path):
    models = make_run(tmp_path / "run", "tiny", steps=(3, 5))
    found = evaluate.model_directory("model", str(tmp_path / "run"), tmp_path)
    again = from_pretrained(found)
    np.testing.assert_array_equal(np.asarray(again(TOKENS_BT)), np.asarray(models[5](TOKENS_BT)))
    assert evaluate.model_directory("model", found, tmp_path) == found


def test_the_export_carries_its_tokenizer(tmp_path):
    make_run(tmp_path / "run", "tiny")
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"])
    ours, theirs = Tokenizer(TINY), Tokenizer(tmp_path / "out")
    assert (ours.eos_ids, ours.bos_id, ours.pad_id) == (theirs.eos_ids, theirs.bos_id, theirs.pad_id)
    assert ours.encode("25+17=42.") == theirs.encode("25+17=42.") and theirs.has_chat_template
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == list(ours.eos_ids) and config["torch_dtype"] == "bfloat16"


def test_adapters_alone_are_exported_for_peft(tmp_path):
    models = make_run(tmp_path / "run", "lora")
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--adapter", "--dtype=float32"])
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = from_pretrained(TINY, adapters=tmp_path / "out")
    np.testing.assert_allclose(np.asarray(again(TOKENS_BT)), np.asarray(models[3](TOKENS_BT)), atol=2e-5, rtol=0)


def test_user_errors_are_one_line(tmp_path):
    make_run(tmp_path / "run", "tiny")
    for arguments, message in [
        (["--workdir=/nowhere", f"--out={tmp_path / 'a'}"], "--workdir=/nowhere has no config.json"),
        (
            [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'a'}", "--step=4"],
            r"no checkpoint of step 4: it has \[3\]",
        ),
        ([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'run'}"], "run exists already"),
        ([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'a'}", "--adapter"], "no adapters to save"),
    ]:
        with pytest.raises(SystemExit, match=message):
            export.main(arguments)
    assert not (tmp_path / "a").exists()


def test_a_refused_export_reads_no_checkpoint(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    make_run(run, "tiny")
    shutil.rmtree(run / "checkpoints")
    for arguments, message in [
        ([f"--out={run}"], "run exists already"),
        ([f"--out={out}", "--adapter"], "no adapters"),
    ]:
        with pytest.raises(SystemExit, match=f"^podrl.export: error: .*{message}"):
            export.main([f"--workdir={run}", *arguments])


def test_the_export_lists_every_end_of_a_turn(tmp_path):
    """The tokenizer ends texts with one id, and the chat template ends turns with another. The exported
    generation_config.json lists both ids, whether or not the base has such a file."""
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    generation = {"eos_token_id": 1, "temperature": 0.6}
    for kept in (generation, None):
        if kept is None:
            (base / "generation_config.json").unlink()
        else:
            (base / "generation_config.json").write_text(json.dumps(kept))
        ends = list(Tokenizer(base).eos_ids)
        assert ends == [1, Tokenizer(base).token_id("<end_of_turn>")]
        model = from_pretrained(base)
        out = tmp_path / ("out" if kept else "out2")
        export.export_params(model.config, model.params, base, out)
        written = json.loads((out / "generation_config.json").read_text())
        rest = {"bos_token_id": 2, "pad_token_id": 0} if kept is None else {"temperature": 0.6}
        assert written == {"eos_token_id": ends, **rest}
        named = Tokenizer(out).apply_chat_template([], tools=[{"function": {"name": "calc"}}])
        assert named == "calc"  # from the template tool_use, which is exported as its own file


def test_an_export_knows_how_its_run_put_questions(tmp_path):
    data = {"system_prompt": "auto", "template": "chat", "question_field": "ask", "answer_field": "gold"}
    asked = {"system_prompt": "", "template": "chat", "question_field": "ask"}
    assert export._prompts(data) == asked and export._prompts(None) is None
    assert (
        export._prompts(data | {"sources": [{"system_prompt": "", "template": "", "question_field": ""}] * 2}) == asked
    )
    assert export._prompts(data | {"system_prompt": "X", "sources": [{"system_prompt": ""}]}) == asked
    assert export._prompts(data | {"sources": [{"system_prompt": "A"}, {"system_prompt": "B"}]}) is None
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(asked))
    assert generate.prompt_settings_of(tmp_path) == asked and generate.prompt_settings_of(tmp_path / "elsewhere") == {}
