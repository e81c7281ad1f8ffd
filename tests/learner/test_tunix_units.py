"""Fields with Tunix's names count in Tunix's units; the expected numbers follow Tunix's rl_learner.py."""

import dataclasses

import jax
import pytest

import podrl
from podrl.data.shape import from_batches
from podrl.learner.loop import Schedule
from podrl.mesh.build import make_mesh
from podrl.rundir import identity
from podrl.trainer.pack_shape import pack_shape

# The unit of every counting field that podrl and Tunix both have; settings.py and config.py explain the other fields.
COUNTED = {
    "RLTrainingConfig": {
        "eval_every_n_steps": "updates",
        "max_steps": "updates",
        "gradient_accumulation_steps": "micro-batches of an update",
        "max_seq_token_per_tpu": "tokens",
        "mini_batch_size": "prompts",
        "train_micro_batch_size": "prompts",
    },
    "RolloutConfig": {"max_tokens_to_generate": "tokens", "max_prompt_length": "tokens", "kv_cache_size": "tokens"},
    "GRPOConfig": {"num_generations": "samples of a prompt", "num_iterations": "passes"},
}


@pytest.mark.parametrize("name", COUNTED)
def test_every_counted_field_says_its_unit(name):
    """The field's line in the docstring, where users look for the unit, contains the first word of the unit."""
    cls = getattr(podrl, name)
    told = " ".join(" ".join((base.__doc__ or "") for base in cls.__mro__).split())
    for field, unit in COUNTED[name].items():
        assert field in {f.name for f in dataclasses.fields(cls)}
        said = told.partition(f"{field}: ")[2].partition(". ")[0]
        assert unit.partition(" ")[0] in said, (field, said)


def test_eight_prompts_of_four_samples_split_as_in_tunix():
    """Tunix makes 8 / 4 = 2 updates of 4 x 4 sequences; an update has 4 / 2 = 2 micro-batches of 2 x 4 sequences."""
    training = podrl.RLTrainingConfig(
        eval_every_n_steps=0, mini_batch_size=4, train_micro_batch_size=2, max_tokens_per_row=100, share_prompts=False
    )
    mesh, sequences = make_mesh("fsdp=1", jax.devices()[:1]), training.mini_batch_size * 4
    shape = pack_shape(training, mesh, sequences=sequences, max_length=100, group_size=4)
    assert (shape.micro_batches, shape.rows) == (2, 8)
    half = dataclasses.replace(training, train_micro_batch_size=None, micro_batch_sequences=2)
    assert pack_shape(half, mesh, sequences=sequences, max_length=100, group_size=4).rows == 2
    with pytest.raises(
        ValueError, match=r"train_micro_batch_size=2 counts prompts, RLTrainingConfig\.micro_batch_sequences=8"
    ):
        dataclasses.replace(training, micro_batch_sequences=8)


@pytest.mark.parametrize(
    ("most", "every", "steps", "evaluated"),
    [(12, 4, 3, [1, 2, 3]), (12, 8, 3, [2, 3]), (10, 6, 3, [2, 3]), (3, 0, 1, [1]), (None, 5, None, [2, 3, 4, 5, 7])],
)
def test_a_run_ends_with_the_batch_that_reaches_max_steps(most, every, steps, evaluated):
    """Tunix's loop over batches ends when `train_steps >= max_steps`; a batch here has 8 / 4 x 2 passes = 4 updates."""
    training = podrl.RLTrainingConfig(eval_every_n_steps=every, max_steps=most, mini_batch_size=4)
    assert training.steps(4) == steps
    schedule = Schedule(max_steps=steps or 100, eval_every=every, updates_per_step=4)
    assert [step for step in range(1, (steps or 7) + 1) if schedule.evaluates(step)] == evaluated
    saved = {"trainer": {"max_steps": most, "mini_batch_size": 4}, "rollout": {"prompts_per_step": 8}}
    assert identity.last_step(saved | {"grpo": {"num_iterations": 2}}) == steps


def test_a_damaged_config_has_no_last_step():
    assert identity.last_step({"trainer": [], "rollout": {"prompts_per_step": "8"}}) is None
    assert identity.last_step({"trainer": {"max_steps": 6}, "grpo": 3, "rollout": None}) == 6


def test_a_cache_holds_prompt_and_completion():
    podrl.RolloutConfig(max_prompt_length=64, max_tokens_to_generate=64, kv_cache_size=128)
    with pytest.raises(ValueError, match=r"exceed RolloutConfig\.kv_cache_size=127"):
        podrl.RolloutConfig(max_prompt_length=64, max_tokens_to_generate=64, kv_cache_size=127)


def test_batches_of_a_dataset_are_steps():
    batches = [{"prompts": ["a", "b"], "answer": ["1", "2"]}, {"prompts": ["c", "d"], "answer": ["3", "4"]}]
    records, size = from_batches(batches)
    assert size == 2 and [r["prompt"] for r in records] == ["a", "b", "c", "d"]
    assert [r["answer"] for r in records] == ["1", "2", "3", "4"]
    plain = ["a", {"prompt": "b"}]
    assert from_batches(plain) == (plain, 0) and from_batches([]) == ([], 0)
    with pytest.raises(ValueError, match="Batch 1 of the dataset has 1 prompt and batch 0 has 2"):
        from_batches([batches[0], {"prompts": ["c"], "answer": ["3"]}])
    with pytest.raises(ValueError, match="'answer' must be a list of 2 values"):
        from_batches([{"prompts": ["a", "b"], "answer": "12"}])


def test_micro_batches_of_an_earlier_run_are_read_in_their_unit():
    mine = {"trainer": {"train_micro_batch_size": None, "micro_batch_sequences": 8}}
    assert identity.changes({"trainer": {"train_micro_batch_size": 8}}, mine, {}) == ([], [])
    now = {"trainer": {"train_micro_batch_size": 8, "micro_batch_sequences": None}}
    assert len(identity.changes({"trainer": {"train_micro_batch_size": 8}}, now, {})[1]) == 2
