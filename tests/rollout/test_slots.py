import dataclasses
import threading

import jax
import numpy as np
import pytest

from podrl.contrib.slots import SlotEngine
from podrl.engine.config import Sampling
from podrl.engine.keys import sample_keys

EOS = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def engine(tiny, tight, tight_config):
    config = dataclasses.replace(tight_config, pool_tokens=None, max_tokens_to_generate=44, prefill_tokens=8)
    return SlotEngine(tight.model, tiny.mesh, config, dtype=np.dtype("float32"), eos_ids=EOS)


@pytest.fixture(scope="module")
def params(engine, tiny):
    return engine.load_params(tiny.params)


def prompt_of(prompts, p):
    """Pads prompt `p` to 32 tokens, a power of two, as a server would; returns the arguments of a prefill."""
    padded = np.zeros(32, np.int32)
    padded[: prompts.length_P[p]] = prompts.tokens_PT[p, : prompts.length_P[p]]
    return {"padded_tokens": jax.numpy.asarray(padded), "true_length": int(prompts.length_P[p])}


def collect(result, slot, tokens, logprobs):
    """Appends the tokens that a call drew for a slot, as a server does; returns False if the sample has ended."""
    data = result.get_result_at_slot(slot)
    valid = np.asarray(data.valid[0]) > 0
    tokens += np.asarray(data.tokens[0])[valid].tolist()
    logprobs += np.asarray(data.log_prob[0])[valid].tolist()
    return bool(valid.all())


def test_a_server_loop_gives_what_a_session_gives(engine, params, tight, policy, prompts_of):
    """A loop of prefill, bulk_insert, generate and free_resource, in which slots are refilled, gives the samples of
    `RolloutWorker.generate`."""
    prompts, G = prompts_of([5, 20, 1, 16, 9]), 3
    sampling = Sampling(max_new=25)
    native = tight.generate(policy, prompts, group_size=G, step=2, sampling=sampling)
    state = engine.init_decode_state()
    free = list(range(engine.max_concurrent_decodes))
    waiting, running, done = list(range(5)), {}, {}
    while waiting or running:
        while waiting and len(free) >= G:
            p = waiting.pop(0)
            keys_G2 = sample_keys(3, 2, np.asarray(prompts.index_P[p]), np.arange(G))
            prefix, first = engine.prefill_multisampling(
                params=params, **prompt_of(prompts, p), num_samples=G, rng=keys_G2, sampling=sampling
            )
            slots = [free.pop() for _ in range(G)]  # the slots of a group may lie on both shards
            prefix = jax.device_put(prefix, engine.get_prefix_destination_sharding())
            state = engine.bulk_insert(prefix, state, slots)
            for g, slot in enumerate(slots):
                running[slot] = (p * G + g, [], [])
                collect(first, g, *running[slot][1:])
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot, (b, tokens, logprobs) in list(running.items()):
            ended = tokens[-1] in EOS
            if ended or not collect(result, slot, tokens, logprobs):
                lengths = result.get_result_at_slot(slot).lengths
                assert lengths[0] == len(tokens) - 1
                engine.free_resource(slot)
                free.append(slot)
                done[b] = (tokens, logprobs)
                del running[slot]
    for b, (tokens, logprobs) in done.items():
        n = prompts.length_P[b // G]
        assert tokens == native.tokens_BT[b, n : native.length_B[b]].tolist()
        np.testing.assert_allclose(logprobs, native.logprob_BT[b, n : native.length_B[b]], atol=1e-5)
    assert sorted(done) == list(range(5 * G))
    assert [len(pages) for pages in engine._free] == [engine._engine.shape.pages - 1] * 2


def test_one_sample_at_a_time_and_a_prefix_in_parts(engine, params, prompts_of):
    """Inserts one prefix into one slot. A prompt that is prefilled in two parts gives the same sample as in one
    part."""
    prompts = prompts_of([19])
    whole = prompt_of(prompts, 0)
    keys = np.array([7, 9], np.uint32)
    greedy = Sampling(temperature=0.0, max_new=8)
    samples = []
    for parts in ([19], [6, 13], [8, 11]):
        prefix, at = None, 0
        for part in parts:
            tokens = whole["padded_tokens"][at : at + part]
            prefix, first = engine.prefill(
                params=params, existing_prefix=prefix, padded_tokens=tokens, true_length=part, rng=keys, sampling=greedy
            )
            at += part
        state = engine.insert(prefix, engine.init_decode_state(), slot=5)
        tokens, logprobs = [], []
        collect(first, 0, tokens, logprobs)
        for _ in range(2):
            state, result = engine.generate(params, state)
            collect(result, 5, tokens, logprobs)
            assert not np.asarray(result.get_result_at_slot(4).valid).any()
        samples.append(tokens)
    assert samples[0] == samples[1] == samples[2] and len(samples[0]) >= 1


def test_inserting_over_a_slot_replaces_it(engine, params, prompts_of):
    prompts = prompts_of([12, 7])
    state = engine.init_decode_state()
    prefixes = [engine.prefill(params=params, **prompt_of(prompts, p))[0] for p in (0, 1)]
    assert prefixes[0].keys != prefixes[1].keys
    state = engine.insert(prefixes[0], state, slot=0)
    state, _ = engine.generate(params, state)
    state = engine.insert(prefixes[1], state, slot=0)
    state, result = engine.generate(params, state)
    assert result.get_result_at_slot(0).lengths[0] <= 4
    threads = [threading.Thread(target=engine.free_resource, args=(slot,)) for slot in (0, 0, 3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    state, result = engine.generate(params, state)
    assert not np.asarray(result.get_result_at_slot(0).valid).any()
    assert [len(pages) for pages in engine._free] == [engine._engine.shape.pages - 1] * 2


def test_a_slot_that_is_filled_again_changes_no_other_sample(engine, params, prompts_of):
    """Two slots read one prompt; then the first of them gets another prompt, which must not touch the second."""
    prompts, sampling = prompts_of([9, 14]), Sampling(max_new=20)
    prefix, _ = engine.prefill_multisampling(
        params=params,
        **prompt_of(prompts, 0),
        num_samples=2,
        rng=sample_keys(3, 2, np.asarray(prompts.index_P[0]), np.arange(2)),
        sampling=sampling,
    )
    other, _ = engine.prefill(
        params=params, **prompt_of(prompts, 1), rng=np.array([7, 9], np.uint32), sampling=sampling
    )
    samples = []
    for refills in (False, True):
        state, tokens, logprobs = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1]), [], []
        state, result = engine.generate(params, state)
        collect(result, 1, tokens, logprobs)
        if refills:
            engine.free_resource(0)
            state = engine.insert(other, state, slot=0)
        while len(tokens) < 12:
            state, result = engine.generate(params, state)
            assert collect(result, 1, tokens, logprobs)
        samples.append((tokens, logprobs))
    assert samples[0] == samples[1]


def test_what_it_says_about_itself(engine, tiny):
    assert (engine.max_concurrent_decodes, engine.max_prefill_length, engine.mesh) == (8, 20, tiny.mesh)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"true_length": 0}, "prompt is empty"),
        ({"true_length": 21}, "max_prompt_length=20"),
        ({"sampler": lambda x: x}, "sampler is not supported"),
        ({"rng": np.zeros((2, 2), np.uint32)}, "2 keys for 1 samples"),
        ({"sampling": Sampling(stop_ids=(9, 10, 11, 12))}, "at most 8 ids"),
        ({"sampling": Sampling(stop_strings=("x",))}, "stop_strings"),
    ],
)
def test_what_it_refuses_at_prefill(engine, params, changes, message):
    arguments = {"padded_tokens": np.full(32, 9, np.int32), "true_length": 3, **changes}
    with pytest.raises(ValueError, match=message):
        engine.prefill(params=params, **arguments)


def test_what_it_refuses_at_insert(engine, params, prompts_of):
    prefix, _ = engine.prefill(params=params, **prompt_of(prompts_of([4]), 0))
    state = engine.init_decode_state()
    for slots, message in (([0, 1], "2 slots for a prefix of 1"), ([8], "must differ and lie in")):
        with pytest.raises(ValueError, match=message):
            engine.bulk_insert(prefix, state, slots)
