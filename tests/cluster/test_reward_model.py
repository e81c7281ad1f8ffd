"""A reward model is loaded from a classification directory; its score at the last token is added to the rewards."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from podrl.cluster.config import ClusterConfig, Role
from podrl.cluster.reward_model import RewardModel
from podrl.cluster.rl_cluster import RLCluster
from podrl.data.tokenizer import Tokenizer
from podrl.engine.config import RolloutConfig
from podrl.job.config import TINY
from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.models.hf_load import load
from podrl.models.scalar import HEAD
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.trainer.config import RLTrainingConfig
from podrl.types import NO_EPISODE, Prompts, Rollouts, blank_columns


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Writes the embedded model as a reward model with a random head; returns its directory."""
    import ml_dtypes  # noqa: F401 - bfloat16 for safetensors

    out = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(TINY, out)
    tensors = load_file(TINY / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    head = np.random.default_rng(1).normal(size=(1, width)).astype(np.float32)
    save_file(tensors | {"score.weight": head.astype(tensors["model.norm.weight"].dtype)}, out / "model.safetensors")
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"architectures": ["Gemma2ForSequenceClassification"]}))
    return out


def samples(B=11, T=24, vocab=300):
    rng = np.random.default_rng(2)
    length_B = rng.integers(2, T + 1, B)
    tokens_BT = np.where(np.arange(T) < length_B[:, None], rng.integers(1, vocab, (B, T)), 0)
    return tokens_BT.astype(np.int32), length_B


@pytest.mark.parametrize("spec", ["data=1", "data=2,fsdp=2", "seq=5"])  # 24 is not a multiple of 5
def test_the_score_is_the_heads_at_the_last_token(directory, spec):
    sizes = [int(part.split("=")[1]) for part in spec.split(",")]
    mesh = make_mesh(spec, jax.devices()[: int(np.prod(sizes))])
    model = RewardModel(str(directory), mesh, Tokenizer(TINY), longest=24)
    tokens_BT, length_B = samples()
    found_B = model.score(tokens_BT, length_B)
    config, params = load(TINY)
    head_D1 = jnp.asarray(load_file(directory / "model.safetensors")["score.weight"].astype(np.float32).T)
    for b in (0, 5, 10):
        row_1T = jnp.asarray(tokens_BT[b : b + 1, : length_B[b]])
        place_1T = jnp.arange(length_B[b])[None]
        hidden_1TD = decoder.hidden(params, row_1T, jnp.ones_like(row_1T), place_1T, config)
        assert found_B[b] == pytest.approx(float((hidden_1TD @ head_D1)[0, -1, 0]), abs=1e-4)
    assert np.ptp(found_B) > 0.1 and HEAD == "score"
    with pytest.raises(ValueError, match="set up for 24"):
        model.score(np.zeros((1, 30), np.int32), np.array([30]))


QUESTION, PROMPT = "2 + 2 =", "<bos><start_of_turn>user\nBe brief.\n\n2 + 2 =<end_of_turn>\n<start_of_turn>model\n"
COMPLETIONS = ["4", "It is <answer>4</answer>", "five"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(params=["chat", "plain"])
def bytewise(request, directory, tmp_path):
    """Makes the reward model with a byte tokenizer, with and without a chat template; returns its directory, its
    tokens, and the texts that it must score."""
    out = tmp_path / "model"
    shutil.copytree(directory, out)
    pieces = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(out / "tokenizer.json"))
    chat = {"chat_template": CHAT} if request.param == "chat" else {}
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | chat))
    frame = "[user] Be brief.\n\n2 + 2 =\n[assistant] {}\n" if chat else "user\nBe brief.\n\n2 + 2 =\nmodel\n{}"
    return out, pieces, [frame.format(completion) for completion in COMPLETIONS]


def answered():
    """Makes rollouts with COMPLETIONS to PROMPT in the policy's tokens, and the fields of their records."""
    policy = Tokenizer(TINY)
    rows = [[*policy.encode(PROMPT + completion), *policy.eos_ids[:1]] for completion in COMPLETIONS]
    B, T = len(rows), max(map(len, rows))
    tokens_BT = np.array([row + [policy.pad_id] * (T - len(row)) for row in rows], np.int32)
    zeros_BT, length_B = np.zeros((B, T), np.float32), np.array([len(row) for row in rows])
    prompts = Prompts(tokens_BT[:, :1], np.ones(B, np.int32), np.arange(B), [PROMPT] * B, {}, b"")
    rows = blank_columns((B, T), pad_id=policy.pad_id) | {"tokens_BT": tokens_BT, "mask_BT": zeros_BT}
    rows |= {"group_B": np.arange(B), "turn_reward_BT": zeros_BT, "length_B": length_B, "stop_B": length_B}
    rollouts = Rollouts(prompts=prompts, completions=COMPLETIONS, episodes=[NO_EPISODE] * B, seconds=1.0, **rows)
    return rollouts, {"question": [QUESTION] * B, "system_prompt": ["Be brief."] * B, "answer": ["4"] * B}


def test_a_model_with_another_tokenizer_reads_the_text(bytewise):
    out, pieces, texts = bytewise
    rollouts, fields = answered()
    mesh = make_mesh("data=1", jax.devices()[:1])
    model = RewardModel(str(out), mesh, Tokenizer(TINY), longest=64)
    found_B = model.score_samples(rollouts, fields)
    # By hand: the start token, then every byte's piece ('Ġ' and 'Ċ' are how byte-level pieces write space and newline).
    rows = [[0, *(pieces.index({" ": "Ġ", "\n": "Ċ"}.get(c, c)) for c in text)] for text in texts]
    config, params = load(TINY)
    head_D1 = jnp.asarray(load_file(out / "model.safetensors")["score.weight"].astype(np.float32).T)

    def direct(row):
        row_1T = jnp.asarray([row])
        hidden_1TD = decoder.hidden(params, row_1T, jnp.ones_like(row_1T), jnp.arange(len(row))[None], config)
        return float((hidden_1TD @ head_D1)[0, -1, 0])

    np.testing.assert_allclose(found_B, [direct(row) for row in rows], atol=1e-4)
    assert np.ptp(found_B) > 0.1
    # A reward model for samples of 16 policy tokens reads 32 of its own tokens and ignores the rest.
    short = RewardModel(str(out), mesh, Tokenizer(TINY), longest=16)
    np.testing.assert_allclose(short.score_samples(rollouts, fields), [direct(row[:32]) for row in rows], atol=1e-4)


def test_a_model_with_the_policys_tokenizer_reads_its_tokens(directory):
    rollouts, fields = answered()
    model = RewardModel(str(directory), make_mesh("data=1", jax.devices()[:1]), Tokenizer(TINY), longest=64)
    expected_B = model.score(rollouts.tokens_BT, rollouts.length_B)
    np.testing.assert_array_equal(model.score_samples(rollouts, fields), expected_B)


def test_what_is_no_reward_model_is_refused(directory):
    mesh = make_mesh("data=1", jax.devices()[:1])
    with pytest.raises(ValueError, match="num_labels=1"):
        RewardModel(str(TINY), mesh, Tokenizer(TINY), longest=24)


def test_its_score_is_one_more_reward():
    config = RewardConfig(fns=("r1_format",), weights=(2.0,), model="somewhere", model_weight=0.5, workers=1)
    with Rewards(config) as rewards:
        assert rewards.names == ("r1_format", "reward_model")
        own_FB = rewards.score(["q"], ["<think></think><answer></answer>"], {})
        assert own_FB.shape == (1, 1)
        np.testing.assert_allclose(rewards.combine(np.concatenate([own_FB, [[3.0]]])), [3.5])
    with Rewards(RewardConfig(fns=(), model="somewhere")) as alone:
        assert alone.score(["q"], ["c"], {}).shape == (0, 1)


def test_it_may_not_share_devices_with_the_actor():
    actor, rollout = make_mesh("fsdp=2", jax.devices()[:2]), make_mesh("data=2", jax.devices()[2:4])
    training, generation = RLTrainingConfig(eval_every_n_steps=0), RolloutConfig()
    for reward, fine in ((rollout, True), (make_mesh("data=1", jax.devices()[4:5]), True), (actor, False)):
        roles = {Role.ACTOR: actor, Role.ROLLOUT: rollout, Role.REWARD: reward}
        if fine:
            ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=generation)
            continue
        with pytest.raises(ValueError, match=r"Role.REWARD on devices of Role.ACTOR"):
            ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=generation)


def test_a_dense_model_on_a_mesh_of_its_own_that_cuts_experts_is_refused(directory):
    devices = jax.devices()
    roles = {Role.ACTOR: make_mesh("fsdp=2", devices[:2]), Role.ROLLOUT: make_mesh("data=2", devices[2:4])}
    roles |= {role: make_mesh("expert=2", devices[i : i + 2]) for role, i in ((Role.REWARD, 4), (Role.CRITIC, 6))}
    training = RLTrainingConfig(eval_every_n_steps=0)
    config = ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=RolloutConfig())
    with pytest.raises(
        ValueError, match=r"^ClusterConfig\.role_to_mesh\[Role\.REWARD\]='expert=2' .* a gemma2 model has none"
    ):
        RLCluster(actor=TINY, reward=directory, cluster_config=config)
    with pytest.raises(
        ValueError, match=r"^ClusterConfig\.role_to_mesh\[Role\.CRITIC\]='expert=2' .* a gemma2 model has none"
    ):
        RLCluster(actor=TINY, cluster_config=config).make_critic()


@pytest.mark.nightly("podrl/models", "podrl/cluster/reward_model.py")
@pytest.mark.parity
def test_same_scores_as_transformers(directory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        pathlib.Path(directory), num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    theirs.config.pad_token_id = 0
    tokens_BT, length_B = samples()
    model = RewardModel(str(directory), make_mesh("data=1", jax.devices()[:1]), Tokenizer(TINY), longest=24)
    with torch.no_grad():
        expected = [
            float(theirs(input_ids=torch.tensor(tokens_BT[b : b + 1, : length_B[b]], dtype=torch.long)).logits[0, 0])
            for b in range(len(length_B))
        ]
    np.testing.assert_allclose(model.score(tokens_BT, length_B), expected, atol=2e-4)


def test_a_model_in_a_bucket_scores_as_one_on_disk(directory, bucket):
    for file in directory.iterdir():
        bucket.put(f"models/reward/{file.name}", file.read_bytes())
    mesh = make_mesh("data=1", jax.devices()[:1])
    here, there = (
        RewardModel(place, mesh, Tokenizer(TINY), longest=24) for place in (str(directory), "gs://bucket/models/reward")
    )
    assert there.own is None
    np.testing.assert_array_equal(there.score(*samples()), here.score(*samples()))
