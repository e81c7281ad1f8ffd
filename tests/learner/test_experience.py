"""Batches of experience survive checkpoints and transfers between hosts exactly."""

import dataclasses
import json

import numpy as np

from podrl.learner import experience as codec
from podrl.types import Experience, Prompts, Rollouts

PAD = 77


def _experience(seed: int) -> Experience:
    rng = np.random.default_rng(seed)
    length_P, length_B = np.array([3, 5], np.int32), np.array([8, 7, 6, 8], np.int32)
    real_BT = np.arange(8) < length_B[:, None]
    prompts = Prompts(
        tokens_PT=np.where(np.arange(5) < length_P[:, None], rng.integers(0, 9, (2, 5)), PAD).astype(np.int32),
        length_P=length_P,
        index_P=np.array([4, 5], np.int64),
        text=["a é", "b"],
        fields={"answer": ["1", "2"], "level": [1, 2]},
        data_state=b'{"next": 6}',
    )
    rollouts = Rollouts(
        prompts=prompts,
        group_B=np.array([0, 0, 1, 1], np.int32),
        tokens_BT=np.where(real_BT, rng.integers(0, 9, (4, 8)), PAD).astype(np.int32),
        length_B=length_B,
        piece_BT=np.where(real_BT & (np.arange(8) >= 6), [[0], [1], [0], [1]], 0).astype(np.int16),
        mask_BT=rng.integers(0, 2, (4, 8)).astype(np.float32),
        logprob_BT=np.where(real_BT, rng.normal(size=(4, 8)), 0.0).astype(np.float32),
        kept_BT=np.where(real_BT, rng.uniform(size=(4, 8)), 1.0).astype(np.float32),
        raw_logprob_BT=np.where(real_BT, rng.normal(size=(4, 8)), 0.0).astype(np.float32),
        version_BT=np.where(real_BT, 3, -1).astype(np.int32),
        turn_reward_BT=np.where(rng.uniform(size=(4, 8)) < 0.2, rng.normal(size=(4, 8)), 0.0).astype(np.float32),
        stop_B=np.array([0, 1, 0, 2], np.int32),
        completions=["x", "y", "z", ""],
        episodes=[{"turns": [{"by": "model", "text": "é", "tokens": 2}], "metrics": {"won": 1.0}, "seconds": 0.5}] * 4,
        seconds=0.25,
    )
    return Experience(
        rollouts, rng.normal(size=(3, 4)), rng.normal(size=4), np.zeros(4), 0.5, {"x": 1.0}, np.zeros(4, np.int32)
    )


def _same(a, b):
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def test_round_trip_through_json_and_arrays():
    batches = [_experience(0), _experience(1)]
    host, arrays = codec.dump(batches)
    loaded = codec.load(json.loads(json.dumps(host)), arrays, PAD)
    assert len(loaded) == 2 and all(_same(a, b) for a, b in zip(batches, loaded, strict=True))


def test_recorded_routes_survive_checkpoints_and_go_to_other_hosts():
    batch, plain = _experience(0), _experience(1)
    real_BT = np.arange(8) < batch.rollouts.length_B[:, None]
    route_BTX = np.where(real_BT[..., None], np.random.default_rng(2).integers(1, 9, (4, 8, 6)), 0).astype(np.uint8)
    batch = dataclasses.replace(batch, rollouts=dataclasses.replace(batch.rollouts, route_BTX=route_BTX))
    host, arrays = codec.dump([batch, plain])
    loaded = codec.load(json.loads(json.dumps(host)), arrays, PAD)
    assert _same(batch, loaded[0]) and loaded[1].rollouts.route_BTX is None
    # The second host's part has no routes, so the tokens of this part get no recorded routes.
    whole = codec.assemble([codec.header(batch), codec.header(plain)], PAD, codec.NEEDED_ROWS)
    chosen = np.array([1, 3])
    codec.fill_rows(whole, chosen, codec.rows(batch, chosen, codec.NEEDED_ROWS))
    codec.fill_rows(whole, 4 + chosen, codec.rows(plain, chosen, codec.NEEDED_ROWS))
    np.testing.assert_array_equal(whole.rollouts.route_BTX[chosen], route_BTX[chosen])
    assert not whole.rollouts.route_BTX[[0, 2, 4, 5, 6, 7]].any()


def test_a_batch_without_rewards_of_turns_makes_no_empty_array():
    """Rewards of turns that are all 0 make no array for a checkpoint, because Orbax cannot store empty arrays."""
    batch = _experience(0)
    batch.rollouts.turn_reward_BT[:] = 0
    host, arrays = codec.dump([batch])
    assert all(x.size for x in arrays.values())
    (loaded,) = codec.load(json.loads(json.dumps(host)), arrays, PAD)
    assert _same(batch, loaded)


def test_nothing_in_flight():
    host, arrays = codec.dump([])
    assert codec.load(host, arrays, PAD) == []


def test_the_shares_of_two_hosts_make_one_batch():
    """Headers go to all hosts, rows to the hosts that train on them, texts to the host that writes them."""
    shares = [_experience(0), _experience(1)]
    whole = codec.assemble([codec.header(share) for share in shares], PAD)
    assert whole.reward_FB.shape == (3, 8) and whole.rollouts.completions == [""] * 8
    np.testing.assert_array_equal(whole.rollouts.mask_BT[4:], shares[1].rollouts.mask_BT)
    chosen = np.array([1, 3])
    codec.fill_rows(whole, 4 + chosen, codec.rows(shares[1], chosen, codec.NEEDED_ROWS))
    np.testing.assert_array_equal(whole.rollouts.logprob_BT[[5, 7]], shares[1].rollouts.logprob_BT[chosen])
    assert not whole.rollouts.logprob_BT[[0, 1, 2, 3, 4, 6]].any()
    whole.rollouts.prompts.length_P[:] = 3
    codec.fill_prompts(whole, 4 + chosen)
    tokens_BT = whole.rollouts.tokens_BT
    np.testing.assert_array_equal(tokens_BT[[4, 6], :3], tokens_BT[[5, 7], :3])
    assert (tokens_BT[[4, 6], 3:] == PAD).all() and (tokens_BT[:4] == PAD).all(), (
        "prompts are filled in for the groups of the chosen rows only"
    )
    told = codec.with_texts(whole, [codec.texts(share) for share in shares])
    assert told.rollouts.completions == ["x", "y", "z", ""] * 2 and told.rollouts.prompts.text == ["a é", "b"] * 2
    assert told.data_state == b'{"next": 6}'


def test_prompts_of_two_hosts_may_have_other_fields():
    """With `rollout.clock='wall'` a batch may join prompts that were read in different batches, perhaps from different
    sources of a mixture."""
    shares = [_experience(0), _experience(1)]
    names = [{"tests": ["1", "2"]}, {"hint": ["h", "i"]}]
    messages = [codec.whole(share) for share in shares]
    whole = codec.assemble(messages, PAD)
    for message, fields in zip(messages, names, strict=True):
        message.value["fields"] = fields
    fields = codec.with_texts(whole, messages).rollouts.prompts.fields
    assert fields == {"tests": ["1", "2", None, None], "hint": [None, None, "h", "i"]}
