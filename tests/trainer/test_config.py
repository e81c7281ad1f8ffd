"""RLTrainingConfig: Tunix's names and defaults, refusals, and batch sizes."""

import json
import pathlib

import jax
import optax
import pytest

from podrl.mesh.build import make_mesh
from podrl.trainer.config import RLTrainingConfig
from podrl.trainer.pack_shape import _group_row, other_micro_batches, pack_shape

VECTORS = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "vectors" / "config_fields.json"


def _config(**fields):
    return RLTrainingConfig(eval_every_n_steps=10, **fields)


def test_names_and_defaults_are_those_of_tunix():
    if not VECTORS.exists():
        pytest.skip("the field table is not beside the repository")
    fields = json.loads(VECTORS.read_text())["RLTrainingConfig"]["fields"]
    refused = RLTrainingConfig.__refused__
    config = _config()
    for name, field in fields.items():
        if name in refused:
            with pytest.raises(ValueError, match=rf"RLTrainingConfig has no field {name}: \w+"):
                _config(**{name: "asked for"})
        elif field["default"] is not None:
            assert repr(getattr(config, name)) == field["default"], name
        else:
            assert hasattr(config, name), name


def test_unknown_fields_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no field mini_batchsize\. Did you mean 'mini_batch_size'"):
        _config(mini_batchsize=3)


def test_optimizer_spans_all_updates():
    optimizer = _config(max_steps=40, schedule="linear", warmup_fraction=0.5, learning_rate=1.0).optimizer()
    rates = [float(optimizer.schedule(i)) for i in (0, 19, 20, 30, 40)]
    assert rates == pytest.approx([0.05, 1.0, 1.0, 0.5, 0.0])
    with pytest.raises(ValueError, match=r"trainer.schedule='cosine'.*set trainer.max_steps"):
        _config(schedule="cosine").optimizer()


def test_an_optax_transformation_is_taken_as_it_is():
    transform = optax.sgd(0.1)
    assert _config(actor_optimizer=transform).optimizer().transform is transform
    assert _config(critic_optimizer=transform).critic().transform is transform


def test_pack_shape_follows_the_keys():
    mesh = make_mesh("fsdp=4", jax.devices()[:4])

    def shape(**fields):
        return pack_shape(_config(**fields), mesh, sequences=128, max_length=100)

    rows = shape(max_tokens_per_row=200, max_seq_token_per_tpu=400)
    assert (rows.tokens, rows.rows, rows.shards) == (200, 8, 4)
    assert rows.micro_batches * rows.rows >= 64
    assert shape(max_tokens_per_row=200, train_micro_batch_size=16).rows == 8
    assert shape(max_tokens_per_row=200, mini_batch_size=128, gradient_accumulation_steps=4).rows == 16
    default = shape()
    assert default.tokens >= 100 and default.rows % 4 == 0
    with pytest.raises(ValueError, match=r"max_seq_token_per_tpu=64 cannot hold a packed row of 200"):
        shape(max_tokens_per_row=200, max_seq_token_per_tpu=64)
    with pytest.raises(ValueError, match=r"up to 100 tokens do not fit into rows of 64"):
        shape(max_tokens_per_row=64)


def test_micro_batches_of_another_number_or_size_than_asked_are_said_in_a_sentence():
    mesh = make_mesh("fsdp=4", jax.devices()[:4])

    def said(count, sequences=128, **fields):
        training = _config(gradient_accumulation_steps=count, max_tokens_per_row=100, **fields)
        shape = pack_shape(training, mesh, sequences=sequences, max_length=100)
        return " ".join(other_micro_batches(training, shape, sequences, 2))

    assert said(None) == said(1) == said(32) == ""  # four devices take a row each
    assert said(1000) == (
        "trainer.gradient_accumulation_steps=1000 is more than an update can have here: its 128 sequences fill at most "
        "32 x 4 rows of 100 tokens, so there are at most 32 micro-batches. The gradient is the same."
    )
    beside = "trainer.gradient_accumulation_steps=40 has no effect beside trainer.micro_batch_sequences=8."
    assert said(40, micro_batch_sequences=8) == beside
    assert said(None, micro_batch_sequences=8) == said(None, train_micro_batch_size=4) == ""
    uneven = (
        "which the 4 shards of the trainer's mesh do not split evenly: a micro-batch has {} rows of 100 tokens. The "
        "gradient is the same."
    )
    asks = "trainer.micro_batch_sequences=5 asks for micro-batches of 5 sequences, "
    assert said(None, micro_batch_sequences=5) == asks + uneven.format(8)
    asks = "trainer.train_micro_batch_size=1 asks for micro-batches of 2 sequences, "
    assert said(None, train_micro_batch_size=1) == asks + uneven.format(4)
    assert said(None, sequences=4, micro_batch_sequences=5) == ""  # one micro-batch holds the update


def test_rows_cut_along_time_divide():
    mesh = make_mesh("fsdp=2,seq=4", jax.devices())

    def shape(**fields):
        return pack_shape(_config(**fields), mesh, sequences=128, max_length=100)

    default = shape()
    assert default.tokens == 256 and default.shards == 2  # 165 tokens, rounded up to a multiple of 4 x 32
    # The four devices along seq hold 400 tokens, two rows; there are two shards.
    assert shape(max_tokens_per_row=200, max_seq_token_per_tpu=100).rows == 4
    with pytest.raises(ValueError, match=r"trainer.max_tokens_per_row=202 must be a multiple of the mesh's seq=4"):
        shape(max_tokens_per_row=202)
    with pytest.raises(ValueError, match=r"max_seq_token_per_tpu=40 cannot hold a packed row of 200"):
        shape(max_tokens_per_row=200, max_seq_token_per_tpu=40)


def test_rows_are_made_for_samples_that_share_their_prompt():
    mesh = make_mesh("fsdp=4", jax.devices()[:4])

    def shape(max_length=700, max_prompt_length=500, group_size=8, **fields):
        sizes = {"max_length": max_length, "group_size": group_size, "max_prompt_length": max_prompt_length}
        return pack_shape(_config(**fields), mesh, sequences=64, **sizes)

    assert shape().shared and not shape(share_prompts=False).shared
    assert not shape(group_size=1).shared and not shape(max_prompt_length=0).shared
    assert not shape(max_prompt_length=1).shared  # a prompt of one token has nothing to share
    # A CPU device takes 1,280 tokens, and a group has 500 + 8 x 201: a row gets 500 + 3 x 201 tokens, rounded up to 32.
    assert (shape(share_prompts=False).tokens, shape().tokens) == (704, 1120)
    assert shape(group_size=2).tokens == 928
    assert shape(max_seq_token_per_tpu=1000).tokens == 928
    # Not even two samples of 1,000 tokens fit into a row of a CPU device.
    assert shape(max_length=1000).tokens == shape(max_length=1000, share_prompts=False).tokens
    small = shape(micro_batch_sequences=8)
    assert small.rows * small.tokens <= 8 * 704 + 4 * small.tokens  # within the requested memory, in whole shards
    assert shape(max_tokens_per_row=800).tokens == 800
    short = shape(max_length=100, max_prompt_length=60)
    alone = shape(max_length=100, max_prompt_length=60, share_prompts=False)
    assert short.tokens == alone.tokens and short.rows < alone.rows
    assert short.rows * short.micro_batches >= 64


def test_rows_of_a_group_that_does_not_fit_are_even_on_accelerators():
    """A prompt of 512 tokens and six completions of 512 fit into 4,096, but two rows of four samples are shorter."""
    assert _group_row(8, 512, 1024, 4096, 4096, even=False) == 512 + 6 * 513
    assert _group_row(8, 512, 1024, 4096, 4096, even=True) == 512 + 4 * 513
    assert _group_row(8, 512, 1024, 8192, 8192, even=True) == 512 + 8 * 513
    assert _group_row(8, 512, 1024, 1537, 1537, even=True) == 0  # one sample is not a group
    assert _group_row(8, 512, 1024, 4096, 4615, even=True) == 512 + 4 * 513
    assert _group_row(8, 512, 1024, 4096, 4616, even=True) == 512 + 8 * 513


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 4736),  # the whole group: 4,616 tokens are an eighth more than 4,096
        ({"max_seq_token_per_tpu": 4096}, 2688),  # an explicit limit is never exceeded
        ({"micro_batch_sequences": 4}, 2688),
        ({"gradient_accumulation_steps": 2}, 2688),
    ],
)
def test_a_row_of_an_accelerator_may_be_a_quarter_longer_for_a_whole_group(fields: dict, tokens: int, monkeypatch):
    monkeypatch.setattr("podrl.trainer.pack_shape._kind", lambda mesh: "accelerator")
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    sizes = {"max_length": 1024, "group_size": 8, "max_prompt_length": 512}
    assert pack_shape(_config(**fields), mesh, sequences=8, **sizes).tokens == tokens


def test_errors_name_values_and_keys():
    odd = _config(mini_batch_size=2, train_micro_batch_size=3, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"=2 makes 8 sequences, not micro-batches of 3 x"):
        pack_shape(odd, make_mesh("fsdp=1", jax.devices()[:1]), sequences=8, max_length=100)
    with pytest.raises(
        ValueError, match=r"^RLTrainingConfig\.max_steps=0 must be a whole number in \[1, 2147483647\] or"
    ):
        _config(max_steps=0)
    with pytest.raises(ValueError, match=r"^RLTrainingConfig.warmup_fraction=1.5 must be a number in \[0, 1\)"):
        _config(warmup_fraction=1.5)
