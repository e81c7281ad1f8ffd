"""podrl's decoder against transformers on checkpoints that transformers writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import hf_cases  # noqa: E402 - it imports torch and transformers

from podrl.mesh import build  # noqa: E402
from podrl.models import decoder, from_pretrained, hf_save  # noqa: E402
from podrl.models.tensor_files import scan_directory  # noqa: E402

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers warn about their own code
    pytest.mark.nightly("podrl/models", "tests/parity"),
]

TIME, NEW = 20, 32


@pytest.fixture(params=hf_cases.CASES, ids=[c[0] for c in hf_cases.CASES])
def pair(request, tmp_path):
    """Makes a pair: (transformers' model, podrl's model on 8 devices, the checkpoint's directory)."""
    _, config_class, changes = request.param
    theirs = hf_cases.make_model(config_class, changes)
    directory = hf_cases.save_model(theirs, tmp_path / "model")
    mesh = build.make_mesh("data=2,fsdp=2,tensor=2", jax.devices())
    return theirs, from_pretrained(directory, mesh), directory


def test_logits_gradients_and_greedy_tokens_agree(pair, tmp_path):
    theirs, ours, _ = pair
    tokens_BT = hf_cases.make_tokens((2, TIME), ours.config.vocab_size)
    want_BTV = hf_cases.logits(theirs, tokens_BT)
    assert np.abs(want_BTV).max() > 0.5
    np.testing.assert_allclose(np.asarray(ours(tokens_BT)), want_BTV, atol=1e-4, rtol=0)
    compare_gradients(theirs, ours, tokens_BT, tmp_path)
    compare_greedy(theirs, ours, tokens_BT)


def compare_gradients(theirs, ours, tokens_BT, tmp_path):
    tokens = torch.tensor(tokens_BT.astype(np.int64))
    logits_BTV = theirs(tokens).logits
    torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def loss(params):
        position_BT = jnp.broadcast_to(jnp.arange(TIME), tokens_BT.shape)
        hidden_BTD = decoder.hidden(params, tokens_BT, jnp.ones_like(tokens_BT), position_BT, ours.config)
        logprob_BTV = jax.nn.log_softmax(decoder.unembed(params, hidden_BTD, ours.config)[:, :-1])
        return -jnp.take_along_axis(logprob_BTV, tokens_BT[:, 1:, None], -1).mean()

    hf_save.save(tmp_path / "gradient", ours.config, jax.jit(jax.grad(loss))(ours.params))
    stored = {name: tensor.read() for name, tensor in scan_directory(tmp_path / "gradient").items()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        want = parameter.grad.numpy()
        for part, want_part in parts_of(name, want, stored):
            np.testing.assert_allclose(stored[part], want_part, atol=1e-3 * max(np.abs(want).max(), 1e-3), rtol=0)
            compared += 1
    frozen = ("layer_scalar", "e_score_correction_bias")  # in transformers these are buffers: they are not trained
    scalars = [name for name in stored if name.endswith(frozen)]
    assert all(not stored[name].any() for name in scalars)
    assert compared == len(stored) - len(scalars)


def parts_of(name, value, stored):
    """Splits a parameter as the file does: one tensor per expert, gate and up apart."""
    if name in stored:
        return [(name, value)]
    layer = ".".join(name.split(".")[:3])
    old, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    if not any(stored_name.startswith(old) for stored_name in stored):
        old, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    if name.endswith("gate.weight"):
        return [(f"{old}.gate.weight", value)]
    gate, up, down = (f"{old}.experts.{{}}.{n}.weight" for n in names)
    if name.endswith("down_proj"):
        return [(down.format(e), part) for e, part in enumerate(value)]
    halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in value]
    return [(n.format(e), half) for e, pair in enumerate(halves) for n, half in zip((gate, up), pair, strict=True)]


def compare_greedy(theirs, ours, tokens_BT):
    prompt = torch.tensor(tokens_BT[:1].astype(np.int64))
    mask = torch.ones_like(prompt)
    want = theirs.generate(prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].numpy()
    row_T = np.zeros(TIME + NEW, np.int32)
    row_T[:TIME] = tokens_BT[0]
    for t in range(TIME, TIME + NEW):
        row_T[t] = np.argmax(np.asarray(ours(row_T[None]))[0, t - 1])
    assert row_T.tolist() == want.tolist()


def test_a_saved_checkpoint_is_the_same_model_to_transformers(pair, tmp_path):
    theirs, ours, _ = pair
    ours.save(tmp_path / "exported")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(again) is type(theirs)
    tokens_BT = hf_cases.make_tokens((2, TIME), ours.config.vocab_size, seed=5)
    np.testing.assert_array_equal(hf_cases.logits(again, tokens_BT), hf_cases.logits(theirs, tokens_BT))
