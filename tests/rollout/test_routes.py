"""Router replay: the engine records the experts with which it computed, and the trainer uses the same experts."""

import dataclasses
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_branches import AGENTS, ASKED, TWINS, assert_alike
from test_wall import LAST, NAME, P, mixed
from test_wall import made as by_wall
from test_windows import G, again, made

from podrl.data.dialogue import Dialogue
from podrl.data.tokenizer import Tokenizer
from podrl.engine import engine as engine_module
from podrl.engine.config import Sampling
from podrl.environments.config import EnvironmentConfig
from podrl.environments.journal import Files, Journal
from podrl.environments.workers import Episodes
from podrl.mesh.build import parse_mesh
from podrl.models import decoder, moe
from podrl.models.config import LoraConfig
from podrl.models.hf_config import config_from_hf
from podrl.rollout.episodes import EnvironmentClient
from podrl.rollout.integrity import faults
from podrl.rollout.partial import of_tracks
from podrl.rollout.token_budget import TokenBudget
from podrl.storage.hub import EMBEDDED
from podrl.trainer.objective import Forward
from podrl.trainer.pack_shape import PackShape
from podrl.trainer.packing import place_samples
from podrl.types import Policy, Prompts
from podrl.workers.user_code import Limits

pytestmark = pytest.mark.usefixtures("quick_compilation")
# Models and meshes whose programs take long to compile are tested at night; one model on two devices is tested on every
# change.
FORMS = pytest.mark.nightly("podrl/engine", "podrl/models", "podrl/rollout")

RAW = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SAMPLING = Sampling(max_new=40, stop_ids=(17, 250))


ADAPTERS = LoraConfig(rank=2, alpha=8.0, pattern="q|expert_in|expert_out")


def model(lora=LoraConfig(), raw=RAW, **changes):  # noqa: B008 - frozen
    config = config_from_hf(raw)
    experts = dataclasses.replace(config.experts, score="sigmoid", selection_bias=True, **changes)
    return dataclasses.replace(config, experts=experts, lora=lora)


@pytest.fixture(scope="module")
def routed(tiny_on):
    return tiny_on("data=2", 2, model())


@pytest.fixture(scope="module")
def worker(routed, tight_config):
    return routed.worker(tight_config)


def own_routes(tiny, params, rollouts):
    """Returns the experts that the trainer's routers choose by themselves, (B, T, L * k)."""
    position_BT = np.broadcast_to(np.arange(rollouts.tokens_BT.shape[1]), rollouts.tokens_BT.shape)
    segment_BT = (position_BT < rollouts.length_B[:, None]).astype(np.int32)
    L, k = tiny.model.routed_layers, tiny.model.experts.chosen
    unknown = jnp.zeros((L, *rollouts.tokens_BT.shape, k), moe.route_dtype(tiny.model.experts))
    run = jax.jit(lambda *x: decoder.replayed(*x, tiny.model, route_LBTk=unknown)[1])
    own_LBTk = np.asarray(run(params, rollouts.tokens_BT, segment_BT, position_BT))
    return np.moveaxis(own_LBTk, 0, 2).reshape(*rollouts.tokens_BT.shape, L * k)


def known(rollouts):
    """Returns True for tokens that were fed to a program: all tokens of a sample but the last."""
    return np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[:, None] - 1


@pytest.mark.parametrize(
    ("spec", "unrolled"),
    [
        ("data=2", 12),
        pytest.param("data=2", 0, marks=FORMS),
        pytest.param("fsdp=2", 0, marks=FORMS),
        pytest.param("data=1,fsdp=2,tensor=2", 12, marks=FORMS),
        pytest.param("expert=2", 12, marks=FORMS),
        pytest.param("expert=2", 0, marks=FORMS),
        pytest.param("expert=2,fsdp=2", 0, marks=FORMS),
        pytest.param("expert=3,tensor=2", 0, marks=FORMS),
    ],
)
def test_every_token_that_was_fed_has_the_routes_it_was_computed_with(
    request, tiny_on, tight_config, prompts_of, check, monkeypatch, spec, unrolled
):
    """Covers unrolled and scanned layers, and experts on one device and sharded, with and without adapters.

    The samples' probabilities equal those of the full forward pass.
    """
    monkeypatch.setattr(engine_module, "UNROLLED_LAYERS", unrolled)
    usual = (spec, unrolled) == ("data=2", 12)
    devices = math.prod(parse_mesh(spec))
    routed = request.getfixturevalue("routed") if usual else tiny_on(spec, devices, model(ADAPTERS))
    worker = request.getfixturevalue("worker") if usual else routed.worker(tight_config, warm=False)
    # Prompts have one token up to several pages and chunks; there are more samples than lanes, and the pool spills.
    rollouts = worker.generate(
        Policy(routed.params, 7), prompts_of([5, 20, 9, 1, 16, 17]), group_size=4, step=3, sampling=SAMPLING
    )
    check(routed, rollouts, SAMPLING)
    assert worker.stats.compiles == 0 or not usual
    route_BTX, known_BT = rollouts.route_BTX, known(rollouts)
    assert route_BTX.dtype == np.uint8 and route_BTX.shape[2] == moe.route_bytes(routed.model) == 6
    assert (route_BTX[known_BT] > 0).all() and not route_BTX[~known_BT].any()
    want_BTX = own_routes(routed, routed.params, rollouts)
    np.testing.assert_array_equal(route_BTX[known_BT], want_BTX[known_BT])
    assert len(np.unique(route_BTX[known_BT], axis=0)) > 20  # the routes are not all equal


def test_lanes_that_no_longer_sample_are_given_to_no_expert(routed, tight_config, monkeypatch):
    seen, computed = [], moe.feed_forward

    def watched(*args, real_BT=None, **kwargs):
        seen.append(real_BT)
        return computed(*args, real_BT=real_BT, **kwargs)

    monkeypatch.setattr(moe, "feed_forward", watched)
    engine = routed.worker(tight_config, warm=False)._get_engine(routed.params)
    (generate,) = (program for program in engine.programs(routed.params) if program.name == "generate")
    generate.jitted.lower(*generate.args)
    assert seen and all(real is not None and real.shape == (engine.shape.lanes, 1) for real in seen)


@FORMS
def test_experts_on_several_devices_sample_the_tokens_of_whole_ones(routed, worker, tiny_on, tight_config, prompts_of):
    """Some calls have fewer samples than shards of lanes: a shard without live lanes still computes its experts."""
    spread = tiny_on("expert=2", 2, model())
    other = spread.worker(tight_config, warm=False)
    for lengths, group_size in (([5, 20, 9, 1], 4), ([11], 1)):
        want, got = (
            one.generate(Policy(tiny.params, 7), prompts_of(lengths), group_size=group_size, step=3, sampling=SAMPLING)
            for one, tiny in ((worker, routed), (other, spread))
        )
        np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
        np.testing.assert_array_equal(got.route_BTX, want.route_BTX)
        np.testing.assert_allclose(got.logprob_BT, want.logprob_BT, atol=1e-5)


def check_replayed(tiny, rollouts, shape, *, atol=1e-5):
    """Asserts that a trainer with another selection bias computes the sampler's probabilities if it replays the routes.

    Returns:
      The number of tokens that the trainer routed by itself.
    """

    def biased(path, x):
        noise = 0.3 * jax.random.normal(jax.random.key(4), x.shape)
        return x + noise if path[-1].key == "selection_bias" else x

    params = jax.device_put(jax.tree_util.tree_map_with_path(biased, tiny.params), tiny.shardings)
    B, T = rollouts.tokens_BT.shape
    placement = place_samples(rollouts, np.arange(B), shape)
    forward = Forward(config=tiny.model, mesh=tiny.mesh)

    @jax.jit
    def scores(params, layout):
        hidden_BTD, metrics = forward.replayed(params, layout)
        return forward.scored(params, hidden_BTD, layout)[0], metrics

    def off(layout):
        logprob_BT, metrics = scores(params, jax.tree.map(lambda x: x[0], layout))
        logprob_BT = placement.unpack(np.asarray(logprob_BT)[None], T)
        return np.abs(logprob_BT - rollouts.logprob_BT)[rollouts.mask_BT > 0], metrics

    apart, metrics = off(placement.replayed(rollouts, np.arange(B)))
    assert apart.max() < atol
    assert 0.3 < metrics["moe/route_differs"].mean() <= 1
    unknown = round(float(metrics["moe/replayed"].count - metrics["moe/replayed"].total))
    free, metrics = off(placement.layout(rollouts.tokens_BT))
    assert free.mean() > 1e-3 and not metrics
    return unknown


@pytest.mark.parametrize("shared", [False, True])
def test_trainer_on_recorded_routes_computes_the_samplers_probabilities(routed, worker, prompts_of, shared):
    """The trainer has another selection bias, so by itself it would choose other experts; an expert's weight in the sum
    does not depend on the bias."""
    rollouts = worker.generate(
        Policy(routed.params, 7), prompts_of([5, 20, 9, 1]), group_size=4, step=3, sampling=SAMPLING
    )
    B = len(rollouts.length_B)
    shape = PackShape(micro_batches=1, rows=B, tokens=128, shards=2, shared=shared)
    assert check_replayed(routed, rollouts, shape) == B  # the last token of each sample has no recorded route


def test_routes_of_windows_are_those_of_the_last_version_and_survive_a_kill(routed, worker, prompts_of):
    policies = [Policy(routed.make_params(version), version) for version in range(6)]
    batches = [prompts_of([5, 17, 9], index=np.arange(3) + 3 * b) for b in range(6)]
    found = made(worker, policies, batches, SAMPLING, S=2, quantum=8)
    again = made(worker, policies, batches, SAMPLING, S=2, quantum=8, restarts=(1, 3, 4))
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one.tokens_BT, other.tokens_BT)
        np.testing.assert_array_equal(one.route_BTX, other.route_BTX)
    assert worker.stats.compiles == 0
    for rollouts in found:
        last_B = rollouts.version_BT.max(axis=1)
        assert (rollouts.route_BTX[known(rollouts)] > 0).all()
        for version in set(last_B.tolist()):
            rows_BT = known(rollouts) & (last_B == version)[:, None]
            want_BTX = own_routes(routed, policies[version].params, rollouts)
            np.testing.assert_array_equal(rollouts.route_BTX[rows_BT], want_BTX[rows_BT])
    assert any((rollouts.version_BT.max(axis=1) > 0).any() for rollouts in found) and len(found[0].stop_B) == 3 * G


def test_evaluations_record_none(routed, worker, prompts_of):
    policy = Policy(routed.params, 7)
    asked = {"group_size": 2, "step": 3, "sampling": Sampling(max_new=6)}
    assert worker.generate(policy, prompts_of([5]), mode="eval", **asked).route_BTX is None


@FORMS
def test_routes_beyond_255_experts_take_two_bytes(tiny_on, tight_config, prompts_of):
    wide = tiny_on("data=1", 1, model(count=300, ffn_dim=4))
    rollouts = wide.worker(tight_config, warm=False).generate(
        Policy(wide.params, 0), prompts_of([9, 3]), group_size=2, step=0, sampling=Sampling(max_new=8)
    )
    assert rollouts.route_BTX.shape[2] == moe.route_bytes(wide.model) == 12
    route_LBTk = np.asarray(moe.routes_of(jnp.asarray(rollouts.route_BTX), wide.model))
    got_BTX = np.moveaxis(route_LBTk, 0, 2).reshape(*rollouts.tokens_BT.shape, -1)
    known_BT = known(rollouts)
    np.testing.assert_array_equal(got_BTX[known_BT], own_routes(wide, wide.params, rollouts)[known_BT])
    assert got_BTX.max() > 255


QWEN3_5 = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 320,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
    "full_attention_interval": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


GLM4 = {
    "model_type": "glm4_moe",
    "vocab_size": 320,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 256,
}


# Like Gemma 4 26B-A4B, this model has experts beside a dense MLP, and two kinds of attention.
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "max_position_embeddings": 256,
}


@FORMS
@pytest.mark.parametrize(
    ("raw", "unrolled"),
    [(QWEN3_5, 12), (QWEN3_5, 0), (GLM4, 0), (GEMMA4, 0)],
    ids=["kinds", "scan", "dense", "beside"],
)
def test_layers_of_several_kinds_record_their_experts(
    tiny_on, tight_config, prompts_of, check, monkeypatch, raw, unrolled
):
    monkeypatch.setattr(engine_module, "UNROLLED_LAYERS", unrolled)
    config = config_from_hf(raw)
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, selection_bias=True))
    mixed = tiny_on("data=1", 1, config)
    worker = mixed.worker(tight_config, warm=False)
    rollouts = worker.generate(Policy(mixed.params, 7), prompts_of([5, 20, 9]), group_size=4, step=3, sampling=SAMPLING)
    check(mixed, rollouts, SAMPLING)
    known_BT, want_BTX = known(rollouts), own_routes(mixed, mixed.params, rollouts)
    np.testing.assert_array_equal(rollouts.route_BTX[known_BT], want_BTX[known_BT])
    layers = 3 if raw is GLM4 else 4  # the first layer of GLM4 is dense
    assert want_BTX.shape[2] == 2 * layers
    routes_L = np.moveaxis(want_BTX[known_BT].reshape(-1, layers, 2), 1, 0).reshape(layers, -1)
    assert len({tuple(layer) for layer in routes_L}) == layers
    B = len(rollouts.length_B)
    shape = PackShape(micro_batches=1, rows=B, tokens=128, shared=True)
    assert check_replayed(mixed, rollouts, shape, atol=1e-4) == B  # the last token of each sample has no recorded route


_LESS = '''

class Less:
    """Asks twice in its first run, and once in later runs."""

    async def run(self, task, model):
        first = await model.chat([USER], max_tokens=6)
        if not os.path.exists(ran := f"RAN{task.sample}"):
            open(ran, "w").close()
            await model.chat([USER, first, SURE], max_tokens=6)
        return podrl.Result(1.0)
'''


def chats(tiny_on, tight_config, tmp_path, asked, raw=RAW, room=160, pool_tokens=960):
    """Makes a chat model with experts, its worker with room for `room` tokens of a sample, the prompt `asked` and the
    tokenizer; writes agents.py."""
    tokenizer = Tokenizer(EMBEDDED["tiny_tools"])
    chatty = tiny_on("data=1", 1, dataclasses.replace(model(raw=raw), vocab_size=tokenizer.vocab_size))
    config = dataclasses.replace(tight_config, max_prompt_length=40, kv_cache_size=room, pool_tokens=pool_tokens)
    worker = chatty.worker(config, warm=False, eos_ids=tokenizer.eos_ids, decode=tokenizer.decode)
    (tmp_path / "agents.py").write_text(AGENTS)
    tokens_P = np.asarray([tokenizer.encode(asked, start=True)], np.int32)
    prompts = Prompts(tokens_P, np.asarray([tokens_P.shape[1]]), np.zeros(1, np.int64), [asked], {}, b"")
    return chatty, worker, prompts, tokenizer


@FORMS
@pytest.mark.parametrize(("asked", "raw"), [(ASKED, RAW), ("Else", RAW), (ASKED, QWEN3_5)])
def test_every_branch_of_an_agent_has_the_routes_it_was_computed_with(tiny_on, tight_config, tmp_path, asked, raw):
    chatty, worker, prompts, tokenizer = chats(tiny_on, tight_config, tmp_path, asked, raw)
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Forks"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(tokenizer))
        player = worker.player(prompts, group_size=2, step=1, sampling=Sampling(max_new=100))
        for _ in worker.advance(Policy(chatty.params, 0), [(player, None)]):
            pass
        rollouts = worker.rows(player, 0.0)
    assert rollouts.route_BTX is not None
    own = 0 if asked == ASKED else 1  # piece 0 is then the data's prompt alone, which no program computes
    for b in range(2):
        real_T = np.arange(rollouts.tokens_BT.shape[1]) < rollouts.length_B[b]
        assert rollouts.piece_BT[b].max() == own + 1
        for number in range(own, own + 2):
            rows_T = real_T & (rollouts.piece_BT[b] == number)
            piece = types.SimpleNamespace(tokens_BT=np.zeros((1, 160), np.int32), length_B=rows_T.sum(keepdims=True))
            piece.tokens_BT[0, : rows_T.sum()] = rollouts.tokens_BT[b, rows_T]
            want_TX = own_routes(chatty, chatty.params, piece)[0, : rows_T.sum() - 1]
            np.testing.assert_array_equal(rollouts.route_BTX[b, rows_T][:-1], want_TX)
            assert not rollouts.route_BTX[b, rows_T][-1].any()


@pytest.mark.parametrize("raw", [RAW, pytest.param(QWEN3_5, marks=FORMS), pytest.param(GEMMA4, marks=FORMS)])
def test_rows_and_routes_do_not_depend_on_which_request_goes_on_first_from_an_answer(
    tiny_on, tight_config, tmp_path, monkeypatch, raw
):
    """The pool is so small that caches move to the host between requests."""
    chatty, worker, prompts, tokenizer = chats(tiny_on, tight_config, tmp_path, ASKED, raw, room=320, pool_tokens=368)
    monkeypatch.chdir(tmp_path)
    found = []
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Twins"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(tokenizer))
        for i in range(0, len(TWINS), 60):
            (tmp_path / "ORDER").write_text("\n".join((*TWINS[i : i + 30 : 10], TWINS[-1 - i])))
            player = worker.player(prompts, group_size=4, step=1, sampling=Sampling(max_new=300))
            for _ in worker.advance(Policy(chatty.params, 0), [(player, None)]):
                pass
            found.append(worker.rows(player, 0.0))
            assert not faults(found[-1], step=1, max_staleness=1)
    one = found[0]
    assert worker.stats.spills > 0 and (one.piece_BT.max(axis=1) == 3).all()
    for two in found[1:]:
        assert_alike(one, two)
        np.testing.assert_array_equal(one.route_BTX, two.route_BTX)
    shape = PackShape(micro_batches=1, rows=16, tokens=128, shards=1)
    assert check_replayed(chatty, one, shape, atol=1e-4) == 16  # the last token of each piece has no recorded route


@FORMS
def test_branches_that_windows_cut_keep_their_routes_in_a_run_that_is_killed(tiny_on, tight_config, tmp_path):
    chatty, worker, prompts, tokenizer = chats(tiny_on, tight_config, tmp_path, ASKED)
    policies = [Policy(chatty.make_params(version), version) for version in (1, 2)]
    how = {"group_size": 2, "step": 3, "sampling": Sampling(max_new=100)}
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Forks"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(tokenizer))

        def drawn(*, kill):
            player = worker.player(prompts, **how)
            for _ in worker.advance(policies[0], [(player, 16)]):  # later only the first branch continues
                pass
            if kill:
                part = again(of_tracks(prompts, player.state(), prompt_count=1, step=3, quantum=16))
                player.abandon()
                player = worker.player(prompts, **how, partial=part)
            for _ in worker.advance(policies[1], [(player, None)]):
                pass
            return worker.rows(player, 0.0)

        one, other = drawn(kill=False), drawn(kill=True)
    for name in ("tokens_BT", "piece_BT", "version_BT", "raw_logprob_BT", "route_BTX"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert set(one.version_BT[one.piece_BT == 1]) == {-1, 1} and one.version_BT.max() == 2
    assert one.route_BTX is not None and one.route_BTX[one.version_BT == 1].any()


def test_an_agent_that_asks_less_after_a_kill_keeps_the_routes_of_its_tokens(tiny_on, tight_config, tmp_path):
    """The checkpoint has the routes of two answers of the branch, but the restarted agent requests only the first."""
    chatty, worker, prompts, tokenizer = chats(tiny_on, tight_config, tmp_path, ASKED)
    (tmp_path / "agents.py").write_text(f"{AGENTS}{_LESS.replace('RAN', str(tmp_path / 'ran'))}")
    how = {"group_size": 2, "step": 3, "sampling": Sampling(max_new=100)}
    with Episodes(EnvironmentConfig(environment=f"{tmp_path}/agents.py:Less"), Limits(), journal=None) as host:
        worker.env_client = EnvironmentClient(host, Dialogue(tokenizer))
        player = worker.player(prompts, **how)
        for _ in worker.advance(Policy(chatty.params, 1), [(player, 8)]):
            pass
        part = again(of_tracks(prompts, player.state(), prompt_count=1, step=3, quantum=8))
        assert all(len(sample["answers"]) == 2 for sample in part.samples)
        player.abandon()
        player = worker.player(prompts, **how, partial=part)
        for _ in worker.advance(Policy(chatty.params, 2), [(player, None)]):
            pass
        rollouts = worker.rows(player, 0.0)
    assert (rollouts.mask_BT.sum(axis=1) == 6).all() and rollouts.version_BT.max() == 1
    assert rollouts.route_BTX is not None
    want_BTX, known_BT = own_routes(chatty, chatty.params, rollouts), known(rollouts)
    np.testing.assert_array_equal(rollouts.route_BTX[known_BT], want_BTX[known_BT])


@FORMS
def test_a_run_by_the_wall_clock_is_repeated_with_its_routes(routed, worker, prompts_of, tmp_path):
    policies = [Policy(routed.make_params(version), version) for version in range(LAST + 1)]
    batches = [prompts_of([5, 17, 9], index=np.arange(P) + P * b) for b in range(LAST + 1)]
    run = lambda name, clock: by_wall(worker, policies, batches, SAMPLING, tmp_path / name, S=2, clock=clock)[0]  # noqa: E731
    found = run("one", 3)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / NAME, tmp_path / "two")
    again = run("two", 99)
    assert mixed(found)
    for step, one in found.items():
        rollouts, repeated = one.rollouts, again[step].rollouts
        np.testing.assert_array_equal(rollouts.tokens_BT, repeated.tokens_BT)
        np.testing.assert_array_equal(rollouts.route_BTX, repeated.route_BTX)
        last_B = rollouts.version_BT.max(axis=1)
        for version in set(last_B.tolist()):
            rows_BT = known(rollouts) & (last_B == version)[:, None]
            want_BTX = own_routes(routed, policies[version].params, rollouts)
            np.testing.assert_array_equal(rollouts.route_BTX[rows_BT], want_BTX[rows_BT])


_WILD = '''

class Wild:
    """Asks for something else in each run; nobody receives one of the two answers that go on from its first answer, and
    its last answer."""

    async def run(self, task, model):
        with open("RAN", "a") as file:
            file.write("x")
        more = {"role": "user", "content": os.urandom(2).hex()}
        first = await model.chat([USER], max_tokens=6)
        await model.chat([more], max_tokens=4, aside=True)
        await model.chat([USER, first, more], max_tokens=6)
        model.drop(model.answers - 1)
        await model.chat([USER, first, SURE], max_tokens=6)
        other = await model.chat([more], max_tokens=6)
        await model.chat([more, other, SURE], max_tokens=4)
        model.drop(model.answers - 1)
        return podrl.Result(1.0)
'''


@pytest.mark.nightly("podrl/engine", "podrl/models", "podrl/rollout", "podrl/environments")
def test_a_record_of_an_agent_by_the_wall_clock_has_the_routes_of_its_tokens(tiny_on, tight_config, tmp_path):
    """The episodes go on under a second version with the same weights, as if the learning rate were 0."""
    chatty, worker, prompts, tokenizer = chats(tiny_on, tight_config, tmp_path, ASKED)
    (tmp_path / "agents.py").write_text(f"{AGENTS}{_WILD.replace('RAN', str(tmp_path / 'ran'))}")
    config = EnvironmentConfig(environment=f"{tmp_path}/agents.py:Wild")

    def drawn(budget, *, pauses):
        files = Files(tmp_path / "outside")
        with Episodes(config, Limits(), journal=Journal(files, exact=False)) as host:
            worker.env_client = EnvironmentClient(host, Dialogue(tokenizer), clock="wall")
            player = worker.player(prompts, group_size=2, step=2, sampling=Sampling(max_new=100))
            begun = lambda: min(episode.track is not None and len(episode.track.tokens) for episode in of) > 1  # noqa: E731
            of = list(player._episodes.values())
            for version in (1, 2) if pauses else (2,):
                halt = begun if version == 1 else None
                for _ in worker.advance(Policy(chatty.params, version), [(player, budget)], halt=halt):
                    pass
            files.close()
            return worker.rows(player, 0.0)

    one = drawn(None, pauses=True)
    assert set(one.version_BT[one.mask_BT > 0]) == {1, 2} and (one.piece_BT.max(axis=1) >= 1).all()
    pieces = 2 + one.piece_BT.max(axis=1).sum()
    unknown = check_replayed(chatty, one, PackShape(micro_batches=1, rows=pieces, tokens=160, shards=1))
    # The last token of a piece has no route, except in the two pieces that went on with an answer that left the row.
    assert unknown == pieces - 2
    again = drawn(TokenBudget(repeated=True), pauses=False)
    assert (tmp_path / "ran").read_text() == "xx"  # no agent ran again
    for name in ("tokens_BT", "piece_BT", "mask_BT", "version_BT", "raw_logprob_BT", "route_BTX", "stop_B"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name), err_msg=name)
