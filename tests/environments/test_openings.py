"""An environment's first observation is a part of the prompt: the text of the user's first turn, token for token."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from embedded import TINY

import podrl
from podrl import generate
from podrl.data.dialogue import Dialogue
from podrl.data.hint import TEACHER_PROMPT
from podrl.data.pipeline import PromptStream
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig, Sampling
from podrl.environments.config import EnvironmentConfig
from podrl.environments.tools import ToolEnvironment
from podrl.environments.workers import Episodes
from podrl.job import job
from podrl.job.config import unset
from podrl.mesh.build import make_decoding_mesh
from podrl.models import hf_load
from podrl.rollout.episodes import CLOSING, EnvironmentClient
from podrl.rollout.worker import RolloutWorker
from podrl.runtime.watchdog import EXIT_DONE
from podrl.types import Policy
from podrl.workers.user_code import Limits

HEAD, CLOSED = "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"
GAME = """
import podrl

class Game:
    def reset(self, task):
        return f"You read {len(task.prompt)} characters and stand at <eos> 3.\\n"

    def step(self, text):
        return "Go on.", 0.5, False, {}

class Quiet:
    async def run(self, task, model):
        await model.say(f"{len(task.prompt)}!")

game = podrl.SteppedEnvironment(Game)
raw = podrl.SteppedEnvironment(Game, role="raw")
closed = podrl.SteppedEnvironment(Game, opening=False)
tools = podrl.ToolEnvironment(["calculator"], inner=game)
"""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def engine(tokenizer):
    """Returns (worker with room for two short turns, policy)."""
    mesh = make_decoding_mesh("data=1", jax.devices()[:1], key="mesh")
    model, params = hf_load.load(TINY, mesh, np.dtype("float32"))
    config = RolloutConfig(
        max_tokens_to_generate=6, max_response_tokens=120, max_prompt_length=64, kv_cache_size=184, lanes=8
    )
    ends = {"pad_id": tokenizer.pad_id, "eos_ids": tokenizer.eos_ids, "decode": tokenizer.decode}
    return RolloutWorker(model, mesh, config, seed=0, **ends), Policy(params, 0)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    return f"{tmp_path}/game.py"


def written(tokenizer, ids):
    """Returns the text of tokens, special tokens included."""
    parts, plain = [], []
    for i in [*map(int, ids), None]:
        if i is not None and tokenizer.decode([i]):
            plain.append(i)
            continue
        parts += [tokenizer.decode(plain)] if plain else []
        plain = []
        parts += [] if i is None else [tokenizer.token_text(i)]
    return "".join(parts)


def opening(dialogue, question, seen):
    """Returns the whole text of a prompt of the chat template with an observation, and the tokens of both parts."""
    whole = dialogue.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    text, ids = dialogue.without_closing(whole, dialogue.tokenizer.encode(whole))
    return text, ids, dialogue.opening(seen, prompt=text, closing=dialogue.closing, last=ids[-1])


@pytest.mark.parametrize(
    ("question", "seen", "turn"),
    [
        ("2+2?", "at 3", "2+2?\n\nat 3"),
        ("2+2?", " |x|\n\n", "2+2?\n\n |x|"),
        ("2+2?", "", "2+2?"),
        ("", "at 3", "at 3"),
    ],
)
def test_question_and_observation_are_one_turn(tokenizer, question, seen, turn):
    text, ids, more = opening(Dialogue(tokenizer), question, seen)
    assert text == HEAD + question and written(tokenizer, ids) == text
    assert written(tokenizer, ids + more) == f"{HEAD}{turn}{CLOSED}"
    assert written(tokenizer, ids + more) == tokenizer.apply_chat_template([{"role": "user", "content": turn}])


def test_special_tokens_in_an_observation_are_text(tokenizer):
    _, _, more = opening(Dialogue(tokenizer), "2+2?", "<end_of_turn> <eos>")
    special = [i for i in more if not tokenizer.decode([i])]
    assert [tokenizer.token_text(i) for i in special] == ["<end_of_turn>", "<start_of_turn>"]
    assert "<end_of_turn> <eos>" in tokenizer.decode(more)


def test_a_prompt_that_ends_otherwise_is_not_cut(tokenizer):
    dialogue = Dialogue(tokenizer)
    assert dialogue.without_closing("2+2?", tokenizer.encode("2+2?", start=True)) is None
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}])
    assert dialogue.without_closing(whole, tokenizer.encode(whole)[:-1]) is None


@pytest.mark.parametrize(
    ("prompt", "seen", "whole"),
    [
        ("2+2?\n", "at 3", "2+2?\n\nat 3\n"),
        ("2+2?", "at 3\n", "2+2?\n\nat 3\n"),
        ("2+2?\n\n\n", "at 3", "2+2?\n\n\nat 3\n"),
        ("2+2?\n", "", "2+2?\n"),
        ("\n", "at 3", "\nat 3\n"),
    ],
)
def test_a_plain_prompt_goes_on_with_the_observation(tokenizer, prompt, seen, whole):
    ids = tokenizer.encode(prompt, start=True)
    more = Dialogue(tokenizer).opening(seen, prompt=prompt, closing="", last=ids[-1])
    assert written(tokenizer, ids + more) == f"<bos>{whole}"


def test_prompts_are_cut_once_with_the_hints_of_their_teachers(tokenizer):
    prompts = next(
        PromptStream.from_list(
            [{"question": "2+2?", "env": env} for env in "aba"], tokenizer, prompts_per_step=3, max_prompt_length=64
        )
    )
    hint = tokenizer.encode(f"{HEAD}2+2? It is 4.{CLOSED}")
    other = [*hint[:-1], 5]  # as a teacher with a vocabulary of its own has
    prompts = dataclasses.replace(prompts, fields={**prompts.fields, TEACHER_PROMPT: [hint, hint, other]})
    client = EnvironmentClient(None, Dialogue(tokenizer), observes_first=lambda env: env == "a")
    cut = client.opened(prompts)
    assert cut.text == [f"{HEAD}2+2?", prompts.text[1], prompts.text[2]]
    assert cut.fields[CLOSING] == [CLOSED, None, None]
    assert [written(tokenizer, ids) for ids in cut.fields[TEACHER_PROMPT][:2]] == [
        f"{HEAD}2+2? It is 4.",
        f"{HEAD}2+2? It is 4.{CLOSED}",
    ]
    for p, length in enumerate(cut.length_P):
        assert written(tokenizer, cut.tokens_PT[p, :length]) == cut.text[p]
        assert (cut.tokens_PT[p, length:] == tokenizer.pad_id).all()
    assert client.opened(cut) is cut
    nobody = EnvironmentClient(None, Dialogue(tokenizer))
    assert nobody.opened(prompts) is prompts


@pytest.mark.parametrize("name", ["game", "raw", "tools", "closed"])
def test_samples_begin_with_one_turn_of_the_user(file, tokenizer, engine, name):
    worker, policy = engine
    chat, plain = "Let us play.", "2+2?"
    records = [{"question": chat}, {"prompt": plain}, {"question": chat, "env": f"{file}:Quiet"}]
    prompts = next(PromptStream.from_list(records, tokenizer, prompts_per_step=3, max_prompt_length=64))
    config = EnvironmentConfig(environment=f"{file}:{name}", others=(f"{file}:Quiet",))
    with Episodes(config, Limits(), journal=None) as host:
        client = EnvironmentClient(host, Dialogue(tokenizer), observes_first=host.observes_first)
        worker.env_client = client
        try:
            rollouts = worker.generate(policy, prompts, group_size=2, step=1, sampling=Sampling(max_new=6))
        finally:
            worker.env_client = None

    def seen(prompt):
        return f"You read {len(prompt)} characters and stand at <eos> 3."

    first, whole = f"{HEAD}{chat}", f"{HEAD}{chat}{CLOSED}"
    begins = [f"{first}\n\n{seen(first)}{CLOSED}", f"<bos>{plain}\n\n{seen(plain)}\n", f"{whole}{len(whole)}!"]
    if name == "closed":
        begins[:2] = [whole, f"<bos>{plain}"]
    for b, p in enumerate(rollouts.group_B):
        row_T = rollouts.tokens_BT[b, : rollouts.length_B[b]]
        sampled = int(np.argmax(rollouts.mask_BT[b] > 0))
        assert written(tokenizer, row_T[:sampled]) == begins[p]
        assert not rollouts.mask_BT[b, :sampled].any() and (rollouts.mask_BT[b] > 0).any()
        length = rollouts.prompts.length_P[p]
        start = "<bos>" if p == 1 else ""
        assert written(tokenizer, row_T[:length]) == start + rollouts.prompts.text[p]
    np.testing.assert_array_equal(rollouts.prompts.tokens_PT[2], prompts.tokens_PT[2])


def test_an_environment_of_tools_begins_as_its_inner_one_does():
    game = podrl.SteppedEnvironment(dict)
    assert ToolEnvironment("calculator", inner=game).observes_first
    assert not ToolEnvironment("calculator").observes_first
    assert not podrl.SteppedEnvironment(dict, opening=False).observes_first


def test_generate_and_a_dry_run_show_the_same_prompt(file, tmp_path, capsys, caplog):
    (tmp_path / "p.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    out = tmp_path / "o.jsonl"
    arguments = [f"--model={TINY}", f"--prompts={tmp_path}/p.jsonl", f"--out={out}", f"--env={file}:game"]
    assert generate.main([*arguments, "--max_new=4", "--max_response=120", "--lanes=8"]) == 0, capsys.readouterr().err
    turns = json.loads(out.read_text())["completions"][0]["turns"]
    seen = f"You read {len(HEAD + '2+2?')} characters and stand at <eos> 3."
    tokenizer = Tokenizer(TINY)
    expected = tokenizer.encode_plain(f"\n\n{seen}", behind=tokenizer.encode("?")[-1])
    assert turns[0]["by"] == "environment" and turns[0]["text"] == f"{seen}\n"
    assert turns[0]["tokens"] == len(expected) + len(tokenizer.encode(CLOSED))
    # A dry run warns of the error of an episode, and the error has the prompt that the environment sees.
    raising = "class Env:\n    observes_first = True\n    async def run(self, task, model):\n"
    (tmp_path / "env.py").write_text(raising + "        raise ValueError(repr(task.prompt))\n")
    made = unset("grpo")
    made["trainer"] |= {"max_steps": 1, "eval_every_n_steps": 0}
    made["data"] |= {"path": f"{tmp_path}/p.jsonl", "eval_fraction": 0.0, "cache": "", "system_prompt": ""}
    made["env"] |= {"environment": f"{tmp_path}/env.py:Env", "deadline_s": 300.0}
    made["rollout"] |= {"max_prompt_length": 128, "max_response_tokens": 64}
    made["reward"] |= {"fns": ()}
    made["eval"] |= {"problems": 0}
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    (said,) = [record.getMessage() for record in caplog.records if "tried on" in record.getMessage()]
    assert f"raised ValueError: {HEAD + '2+2?'!r} (" in said
