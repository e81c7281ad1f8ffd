"""Adapters and exports against peft and transformers."""

import itertools

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import hf_cases  # noqa: E402 - it imports torch and transformers

from podrl import export  # noqa: E402
from podrl.job.config import TINY  # noqa: E402
from podrl.mesh import build  # noqa: E402
from podrl.models import Decoder, LoraConfig, from_pretrained  # noqa: E402

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.nightly("podrl/models", "podrl/export.py", "tests/parity"),
]

BY_NAME = {name: (config_class, changes) for name, config_class, changes in hf_cases.CASES}
LORA = LoraConfig(rank=3, alpha=12.0)
NEW = 32


@pytest.fixture(autouse=True)
def _seeded():
    """Seeds the adapters that PEFT draws: some draws magnify the rounding of float32 beyond the bound."""
    torch.manual_seed(0)


def with_effect(model: Decoder) -> Decoder:
    leaves, tree = jax.tree_util.tree_flatten_with_path(model.params)
    changed = [
        jax.random.normal(jax.random.key(i), x.shape) * 0.2 if path[-1].key.endswith("_lora_b") else x
        for i, (path, x) in enumerate(leaves)
    ]
    return Decoder(model.config, jax.tree.unflatten(tree, changed), model.mesh)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *itertools.product(["gemma2_caps", "qwen2_bias", "llama_untied"], ["q|k|v|o|gate|up|down", "q|down"]),
        ("gemma4_small", "q|k|v|o|gate|up|down"),
        ("qwen3_5_shared_heads", "q|in_proj_.*|out_proj"),
    ],
)
def test_peft_loads_what_podrl_writes(tmp_path, name, pattern):
    theirs = hf_cases.make_model(*BY_NAME[name])
    directory = hf_cases.save_model(theirs, tmp_path / "base")
    mesh = build.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    lora = LoraConfig(rank=3, alpha=12.0, pattern=pattern)
    ours = with_effect(from_pretrained(directory, mesh, lora=lora))
    ours.save_adapters(tmp_path / "adapter", base=str(directory))
    tokens_BT = hf_cases.make_tokens((2, 20), ours.config.vocab_size)
    before_BTV = hf_cases.logits(theirs, tokens_BT)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    want_BTV = hf_cases.logits(adapted, tokens_BT)
    assert np.abs(want_BTV - before_BTV).max() > 0.05
    np.testing.assert_allclose(np.asarray(ours(tokens_BT)), want_BTV, atol=1e-4, rtol=0)
    np.testing.assert_allclose(np.asarray(ours.merged()(tokens_BT)), want_BTV, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_untied", ["q_proj", "o_proj", "up_proj"]),
        ("qwen3_untied", "all-linear"),
        ("qwen3_untied", r".*\.(v_proj|down_proj)"),
        ("gemma4_small", ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ("qwen3_5_shared_heads", "all-linear"),
    ],
)
def test_podrl_loads_what_peft_writes(tmp_path, name, targets):
    theirs = hf_cases.make_model(*BY_NAME[name])
    directory = hf_cases.save_model(theirs, tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(theirs, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ours = from_pretrained(directory, adapters=tmp_path / "adapter")
    assert ours.config.lora.rank == 4 and ours.config.lora.alpha == 10.0
    tokens_BT = hf_cases.make_tokens((2, 20), ours.config.vocab_size)
    np.testing.assert_allclose(np.asarray(ours(tokens_BT)), hf_cases.logits(adapted, tokens_BT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", ["qwen3_moe_weighted", "mixtral_one", "gpt_oss", "glm4_moe_dense_first", "qwen3_5_moe", "gemma4_experts"]
)
@pytest.mark.parametrize("pattern", ["q|v|expert_in|expert_out", "gate_up_proj", "expert_out"])
def test_peft_loads_adapters_of_experts_that_podrl_writes(tmp_path, name, pattern):
    theirs = hf_cases.make_model(*BY_NAME[name])
    directory = hf_cases.save_model(theirs, tmp_path / "base")
    mesh = build.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    ours = with_effect(from_pretrained(directory, mesh, lora=LoraConfig(rank=3, alpha=12.0, pattern=pattern)))
    ours.save_adapters(tmp_path / "adapter", base=str(directory))
    tokens_BT = hf_cases.make_tokens((2, 20), ours.config.vocab_size)
    before_BTV = hf_cases.logits(theirs, tokens_BT)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    want_BTV = hf_cases.logits(adapted, tokens_BT)
    assert np.abs(want_BTV - before_BTV).max() > 0.02
    np.testing.assert_allclose(np.asarray(ours(tokens_BT)), want_BTV, atol=1e-4, rtol=0)
    np.testing.assert_allclose(np.asarray(ours.merged()(tokens_BT)), want_BTV, atol=1e-4, rtol=0)


def test_adapters_on_dense_layers_beside_experts_are_not_written(tmp_path):
    directory = hf_cases.save_model(hf_cases.make_model(*BY_NAME["glm4_moe_dense_first"]), tmp_path / "base")
    ours = from_pretrained(directory, lora=LoraConfig(rank=3, alpha=12.0, pattern="q|gate_up_proj|down_proj"))
    with pytest.raises(ValueError, match=r"puts adapters on down in the dense layers of a glm4_moe model"):
        ours.save_adapters(tmp_path / "adapter", base=str(directory))


@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],  # PEFT wraps them in the module's order all the same
        ["experts.down_proj"],
    ],
)
def test_podrl_loads_adapters_of_experts_that_peft_writes(tmp_path, parameters):
    theirs = hf_cases.make_model(*BY_NAME["qwen3_moe_weighted"])
    directory = hf_cases.save_model(theirs, tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=["q_proj"],
        target_parameters=parameters,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(theirs, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ours = from_pretrained(directory, adapters=tmp_path / "adapter")
    tokens_BT = hf_cases.make_tokens((2, 20), ours.config.vocab_size)
    assert {
        f"expert_{n}_lora_a" in ours.params["layers"] for n in (["in", "out"] if len(parameters) > 1 else ["out"])
    } == {True}
    np.testing.assert_allclose(np.asarray(ours(tokens_BT)), hf_cases.logits(adapted, tokens_BT), atol=1e-4, rtol=0)


def test_an_exported_model_writes_the_same_text_in_transformers(tmp_path):
    model = with_effect(from_pretrained(TINY, lora=LORA))
    export.export_params(model.config, model.params, TINY, tmp_path / "out", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Ann has 25 coins. She finds 17 more. How many has she now?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    want = theirs.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    ids = prompt["input_ids"][0].tolist()
    row_T = np.zeros(len(ids) + NEW, np.int32)
    row_T[: len(ids)] = ids
    for t in range(len(ids), len(want)):
        row_T[t] = np.argmax(np.asarray(model(row_T[None]))[0, t - 1])
    assert row_T[: len(want)].tolist() == want and len(want) > len(ids)
