"""Invalid configuration files and overrides are refused in one sentence with file, line, value and key."""

import pathlib

import pytest
from ml_collections import ConfigDict

from podrl.data.template import user_turn
from podrl.job.config import check_text, complete, other_section, parse, with_prompt_length
from podrl.launch import find_config, load_config
from podrl.learner.instructions import instructions_for


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef get_config(:\n", r"--config=FILE: FILE, line 2: invalid syntax\.$"),
        (
            "def get_config():\n    pass\n",
            r"get_config\(\) returned None, but must return an ml_collections.ConfigDict",
        ),
        ("def get_config():\n    return {}\n", r"get_config\(\) returned a dict, but must"),
        ("import nosuch\n", r"--config=FILE, line 1: ModuleNotFoundError: No module named 'nosuch'\.$"),
        ("def get_config():\n    x = {}\n    return x['a']\n", r"--config=FILE, line 3: KeyError: 'a'\.$"),
        ("def get_config():\n    raise ValueError('No such thing.')\n", r"^No such thing \(--config=FILE, line 2\)\.$"),
        ("raise SystemError('odd')\n", r"--config=FILE, line 1: SystemError: odd\.$"),
        ("get_config = 3\n", r"--config=FILE defines no get_config\(\)"),
    ],
)
def test_a_file_that_gives_no_configuration_is_named_with_its_line(text, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=message.replace("FILE", str(file))):
        load_config(str(file))


def test_a_variant_where_there_are_none(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def get_config():\n    pass\n")
    with pytest.raises(ValueError, match=r"mine\.py has no variant 'big': its get_config\(\) takes no arg"):
        load_config(f"{file}:big")


def test_a_misspelt_variant_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no variant 'lorra': .*line \d+\)\. Did you mean 'lora'\?$"):
        load_config(find_config("grpo_gemma.py:lorra"))


@pytest.mark.parametrize("name", ["grpo_qwen.py", "grpo_real.py"])
def test_a_configuration_without_default_asks_for_a_variant(name):
    with pytest.raises(ValueError, match=f"{name} has no default: write {name}:VARIANT, with one of"):
        load_config(str(find_config(name)))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (
            "trainer.max_steps",
            "2.5",
            r"^trainer\.max_steps=2\.5 must be a whole number in \[1, 2147483647\] or None\.$",
        ),
        ("trainer.dtype", "float16", r"^trainer\.dtype=float16 must be 'float32' or 'bfloat16'\.$"),
        ("seed", "x", r"^seed=x must be a whole number in \[0, 4294967295\]\.$"),
        ("grpo.beta", "much", r"^grpo\.beta=much must be a number in \[0, 1e9\]\.$"),
        ("grpo.old_logprob", "new", r"must be 'auto', 'current', 'trainer' or 'sampler'\.$"),
        ("model.lora.rank", "1.0", r"^model\.lora\.rank=1\.0 must be a whole number"),
        ("trainer.share_prompts", "yes", r"^trainer\.share_prompts=yes must be True or False or None\.$"),
    ],
)
def test_an_override_that_its_key_cannot_mean_is_refused_with_what_it_can(key, text, message):
    with pytest.raises(ValueError, match=message):
        check_text(key, text, "grpo")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("rollout.top_p", "None"), ("rollout.top_p", "0.5"), ("log.stall_s", "1e3"), ("data.long_prompts", "error")),
        *(("rollout.max_prompt_length", "0"), ("reward.fns", "('answer',)"), ("eval.problems", "3")),
        *(("rollout.data_type", "bfloat16"), ("model.path", "x"), ("no.such.key", "1"), ("algorithm", "grpo")),
    ],
)
def test_other_overrides_pass(key, text):
    assert check_text(key, text, "grpo") == ((key, text) == ("rollout.top_p", "None")), (
        "only rollout.top_p=None stands for None in a key that otherwise holds a number"
    )


def test_a_section_of_another_algorithm_leads_to_its_own():
    assert other_section("grpo", "ppo") == " The settings of algorithm='ppo' are in config.ppo."
    assert other_section("reward", "dpo") == " algorithm='dpo' reads no such settings."
    assert other_section("trianer", "dpo") == ""


def test_the_recipe_of_tunix_is_that_recipe_to_the_number():
    """Checks that grpo_gemma.py:gemma2_2b_v5e16 has the numbers of Tunix's recipe in docs/from-tunix.md: one epoch of
    GSM8K's 7,473 problems, two problems per step."""
    values = complete(load_config(f"{find_config('grpo_gemma.py')}:gemma2_2b_v5e16").to_dict())
    job = parse(ConfigDict(values).to_dict())
    rollout, algo, trainer, lora = job.rollout, job.algo, job.trainer, job.model.lora
    assert (rollout.prompts_per_step, algo.num_generations, algo.num_iterations, job.max_steps) == (2, 4, 1, 3738)
    assert 7473 <= rollout.prompts_per_step * job.max_steps < 7473 + 8 and job.updates_per_step == 1
    assert (rollout.max_prompt_length, rollout.max_tokens_to_generate, rollout.kv_cache_size) == (256, 512, 1024)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.9, 1.0, 50)
    assert (algo.beta, algo.epsilon, algo.kl_loss_mode) == (0.08, 0.2, "k3")
    assert algo.loss_agg_mode == "sequence-mean-token-mean"
    assert (lora.rank, lora.alpha, lora.pattern) == (64, 64.0, "q|k|v|o|gate|up|down")
    assert (trainer.learning_rate, trainer.b1, trainer.b2, trainer.weight_decay) == (3e-6, 0.9, 0.99, 0.1)
    assert (trainer.schedule, trainer.warmup_fraction, trainer.end_fraction) == ("cosine", 0.1, 0.0)
    assert (trainer.max_grad_norm, trainer.train_micro_batch_size) == (0.1, 2)
    assert (job.checkpoint.every, job.checkpoint.keep) == (500, 4)
    assert job.reward.fns == ("exact_format", "approximate_format", "answer", "number")
    own, page = (
        instructions_for(job.reward.fns),
        pathlib.Path(__file__).parents[1].joinpath("docs", "from-tunix.md").read_text(),
    )
    assert (job.data.system_prompt, job.data.template) == ("auto", "chat")
    assert own == (
        "You are given a problem. Think it through step by step and write your reasoning between <reasoning> and "
        "</reasoning>. Then write the final answer, a single number, between <answer> and </answer>."
    )
    assert own in " ".join(page.split()), "the page must quote podrl's prompt word for word"
    theirs = {"grpo": {"kl_loss_mode": "kl"}, "reward": {"fns": (*job.reward.fns[:3], "recipe_number")}}
    parse(ConfigDict(values | {name: values[name] | changed for name, changed in theirs.items()}).to_dict())
    assert "`--config.grpo.kl_loss_mode=kl`" in page and f"{theirs['reward']['fns']}".replace(" ", "") in page
    # A user can set the recipe's system prompt as the page says. The page has only the SHA-256 of that prompt, so this
    # test sets another text.
    values["data"]["system_prompt"] = "Words of another recipe."
    given = parse(with_prompt_length(ConfigDict(values).to_dict())).data.system_prompt
    assert user_turn("How many?", given) == "Words of another recipe.\n\nHow many?"
