"""Tools that the chat template names: prompts are the same in one process, in a pod, and after a resume."""

import json
import shutil

import pytest
from processes import SMALL, TWO_DEVICES, comparable, job, run, trained_steps

from podrl.job.config import TINY

pytestmark = pytest.mark.e2e
TEMPLATE = (
    "{{ bos_token }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
TOOL = '''
def sum_of(query: str) -> str:
    """DESCRIPTION"""
    return str(sum(map(int, query.split("+"))))
'''
SHAPE = (
    *("--config.trainer.max_steps=2", "--config.checkpoint.every=1", "--config.eval.problems=0", TWO_DEVICES),
    *(
        "--config.rollout.max_prompt_length=0",
        "--config.rollout.max_response_tokens=24",
        "--config.log.samples_every=1",
    ),
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    shutil.copytree(TINY, place / "model")
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (place / "tools.py").write_text(TOOL.replace("DESCRIPTION", "Adds."))
    env = ("--config.env.environment=tools", f"--config.env.tools=('{place}/tools.py:sum_of',)")
    return place, (*SMALL, *SHAPE, *env, "--config.env.parser=hermes", f"--config.model.path={place / 'model'}")


@pytest.fixture(scope="module")
def done(flags, tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run", base=flags[1]).workdir


def prompts(workdir):
    samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    return [sample["prompt"] for sample in samples]


def test_prompts_name_the_tools(done):
    declared = '{"type": "function", "function": {"name": "sum_of", "description": "Adds.", "parameters": {'
    assert prompts(done) and all(text.startswith(f"<bos>{declared}") for text in prompts(done))


def test_other_tools_are_refused_on_resume(flags, done, tmp_path):
    place, base = flags
    shutil.copytree(done, tmp_path / "run")
    (place / "tools.py").write_text(TOOL.replace("DESCRIPTION", "Adds numbers."))
    try:
        with job(tmp_path / "run", "--config.trainer.max_steps=3", base=base) as other:
            other.finish(1)
    finally:
        (place / "tools.py").write_text(TOOL.replace("DESCRIPTION", "Adds."))
    assert "prompts of the checkpoint name other tools" in other.stderr
    run(tmp_path / "run", "--config.trainer.max_steps=3", base=base)
    assert trained_steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.slow
def test_a_pod_has_the_prompts_of_one_process(flags, done, tmp_path):
    pod = run(tmp_path / "run", "--local_processes=2", "--topology=split", base=flags[1]).workdir
    assert prompts(pod) == prompts(done)
    ours, theirs = (trained_steps(workdir) for workdir in (pod, done))
    assert ours == theirs
    for name in ("reward/mean", "tokens/prompt", "tokens/completion"):
        assert [r[name] for r in comparable(pod)] == [r[name] for r in comparable(done)]
