"""Divergences from a teacher, by vocabulary chunks, equal the dense form in values and gradients on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_logprob import B, T, _config, _inputs

from podrl.algorithms.distill import top_k_kl
from podrl.mesh.build import make_mesh
from podrl.models import decoder
from podrl.models.config import gemma2_config
from podrl.trainer.divergence import LogitInputs, chosen_logprobs, token_divergence, top_ids

V, K = 50, 5
MESHES = [("fsdp=4", 4), ("data=2,fsdp=2,tensor=2", 8), ("fsdp=2,seq=4", 8)]


class Case:
    """A policy, a teacher of another width with more token ids, tokens in segments, and weights of the results."""

    def __init__(self, vocab=V, tied=True, softcap=4.0, temperature=0.7, more_ids=2):
        self.config, self.temperature = _config(tied, softcap, vocab), temperature
        self.params, self.hidden_BTD, self.tokens_BT, self.segment_BT, self.weight_2BT = _inputs(self.config)
        self.their_config = dataclasses.replace(_config(not tied, 0.0, vocab + more_ids), model_dim=24)
        name, shape = ("unembed", (24, vocab + more_ids)) if tied else ("embed", (vocab + more_ids, 24))
        keys = jax.random.split(jax.random.key(9), 3)
        self.theirs = {name: 0.3 * jax.random.normal(keys[0], shape)}
        self.their_hidden_BTE = jax.random.normal(keys[1], (B, T, 24))
        self.kl_weight_BT = jax.random.normal(keys[2], (B, T))

    def teacher(self):
        return LogitInputs(self.theirs, self.their_hidden_BTE, self.their_config, ids=self.config.vocab_size)

    def dense(self, params, hidden_BTD):
        """Computes the log-probabilities of all ids under policy and teacher, at each token's place."""
        logits_BTV = decoder.unembed(params, hidden_BTD, self.config) / self.temperature
        theirs_BTV = decoder.unembed(self.theirs, self.their_hidden_BTE, self.their_config) / self.temperature
        both = logits_BTV, theirs_BTV[..., : self.config.vocab_size]
        return tuple(jnp.roll(jax.nn.log_softmax(x, axis=-1), 1, axis=1) for x in both)

    def keep(self):
        segment_BT = self.segment_BT
        keep_BT = (segment_BT == jnp.roll(segment_BT, 1, axis=1)) & (segment_BT > 0)
        return keep_BT & (jnp.arange(T) > 0)

    def gradient(self, run):
        """Returns (derivatives by parameters and hidden states, values) of a weighted sum of the results of `run`."""

        def total(params, hidden_BTD):
            found = run(params, hidden_BTD)
            return sum(jnp.sum(x * w) for x, w in zip(found, (*self.weight_2BT, self.kl_weight_BT), strict=True)), found

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(self.params, self.hidden_BTD)

    def expected(self, ids_BTK=None):
        """Computes log p of the token, entropy and KL densely.

        Args:
          ids_BTK: ids that KL tells apart, with all others counted as one id; None for all ids.
        """

        def run(params, hidden_BTD):
            logp_BTV, theirs_BTV = self.dense(params, hidden_BTD)
            p_BTV = jnp.exp(logp_BTV)
            if ids_BTK is None:
                kl_BT = jnp.sum(p_BTV * (logp_BTV - theirs_BTV), axis=-1)
            else:
                in_BTV = jnp.zeros(p_BTV.shape).at[(*np.ogrid[:B, :T, :1][:2], ids_BTK)].set(1.0)
                kl_BT = jnp.sum(in_BTV * p_BTV * (logp_BTV - theirs_BTV), axis=-1)
                rest_BT, their_rest_BT = (jnp.sum((1 - in_BTV) * p, axis=-1) for p in (p_BTV, jnp.exp(theirs_BTV)))
                kl_BT = kl_BT + rest_BT * jnp.log(rest_BT / their_rest_BT)
            logprob_BT = jnp.take_along_axis(logp_BTV, self.tokens_BT[..., None], axis=-1)[..., 0]
            entropy_BT = -jnp.sum(p_BTV * logp_BTV, axis=-1)
            return tuple(jnp.where(self.keep(), x, 0.0) for x in (logprob_BT, entropy_BT, kl_BT))

        return self.gradient(run)

    def exact(self, **where):
        def run(params, hidden_BTD):
            policy = LogitInputs(params, hidden_BTD, self.config)
            where_to = {"temperature": self.temperature} | where
            return token_divergence(policy, self.teacher(), self.tokens_BT, self.segment_BT, **where_to)

        return self.gradient(run)

    def top_k(self, ids_BTK, **where):
        where_to = {"temperature": self.temperature} | where
        theirs_BTK, _ = jax.jit(lambda: chosen_logprobs(self.teacher(), ids_BTK, self.segment_BT, **where_to))()

        def run(params, hidden_BTD):
            policy = LogitInputs(params, hidden_BTD, self.config)
            wanted_BTJ = jnp.concatenate([self.tokens_BT[..., None], ids_BTK], axis=-1)
            logprob_BTJ, entropy_BT = chosen_logprobs(policy, wanted_BTJ, self.segment_BT, **where_to)
            kl_BT = jnp.where(self.keep(), top_k_kl(logprob_BTJ[..., 1:], theirs_BTK), 0.0)
            return logprob_BTJ[..., 0], entropy_BT, kl_BT

        return self.gradient(run)


def same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(y).max()) > 0.1
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(("tied", "softcap", "temperature"), [(True, 4.0, 0.7), (False, 0.0, 1.0), (True, 0.0, 1.5)])
def test_the_exact_divergence_is_the_dense_one(tied, softcap, temperature):
    case = Case(tied=tied, softcap=softcap, temperature=temperature)
    same(case.exact(), case.expected())


def test_a_temperature_of_nothing_is_refused():
    case = Case(temperature=0.0)
    policy = LogitInputs(case.params, case.hidden_BTD, case.config)
    where = (case.tokens_BT, case.segment_BT)
    for run in (
        lambda: token_divergence(policy, case.teacher(), *where, temperature=0.0),
        lambda: chosen_logprobs(policy, where[0][..., None], where[1], temperature=0.0),
    ):
        with pytest.raises(ValueError, match=r"temperature=0\.0 must be positive: set rollout\.temperature above 0"):
            run()


@pytest.mark.parametrize("vocab", [300, 257])
def test_vocabulary_chunks_that_overlap_count_once(vocab):
    case = Case(vocab=vocab)
    same(case.exact(chunk_elements=1), case.expected())
    ids_BTK = top_ids(LogitInputs(case.params, case.hidden_BTD, case.config), K, chunk_elements=1)
    same(case.top_k(ids_BTK, chunk_elements=1), case.expected(ids_BTK))


@pytest.mark.parametrize(("spec", "count"), MESHES)
def test_mesh_does_not_change_the_result(spec, count):
    mesh = make_mesh(spec, jax.devices()[:count])
    case = Case(vocab=514)
    same(case.exact(mesh=mesh, chunk_elements=1), case.expected())
    policy = LogitInputs(case.params, case.hidden_BTD, case.config)
    ids_BTK = jax.jit(lambda: top_ids(policy, K, mesh=mesh, chunk_elements=1))()
    np.testing.assert_array_equal(ids_BTK, top_ids(policy, K))
    same(case.top_k(ids_BTK, mesh=mesh, chunk_elements=1), case.expected(ids_BTK))


def test_the_top_ids_are_the_likeliest_and_all_of_them_give_the_exact_divergence():
    case = Case(more_ids=0)
    policy = LogitInputs(case.params, case.hidden_BTD, case.config)
    logp_BTV, _ = case.dense(case.params, case.hidden_BTD)
    ids_BTK = top_ids(policy, K)
    np.testing.assert_array_equal(ids_BTK[:, 1:], jax.lax.top_k(logp_BTV, K)[1][:, 1:])
    same(case.top_k(ids_BTK), case.expected(ids_BTK))
    same(case.top_k(top_ids(policy, V)), case.expected())


def test_a_few_ids_give_a_bound_from_below_and_an_equal_teacher_gives_nothing():
    case = Case()
    policy = LogitInputs(case.params, case.hidden_BTD, case.config)
    exact_BT = case.expected()[1][2]
    found_BT = [case.top_k(top_ids(policy, k))[1][2] for k in (1, 5, 20)]
    for less_BT, more_BT in zip(found_BT, [*found_BT[1:], exact_BT], strict=True):
        assert (less_BT <= more_BT + 1e-5).all() and (less_BT >= -1e-6).all()
    run = jax.jit(lambda: token_divergence(policy, policy, case.tokens_BT, case.segment_BT)[2])
    np.testing.assert_allclose(run(), 0.0, atol=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_grows_with_tokens_times_vocabulary(exact):
    """The bytes of temporaries are a + b T + c V, without a term T V, so their mixed difference vanishes."""

    def used(time: int, vocab: int) -> int:
        config = gemma2_config(
            vocab_size=vocab, num_layers=1, model_dim=16, ffn_dim=8, num_heads=2, num_kv_heads=1, head_dim=8
        )
        where_BT = np.ones((4, time), np.int32)
        chunks = {"chunk_elements": 1 << 16}

        def loss(params, hidden_BTD, theirs, their_hidden_BTD, their_logprob_BTK):
            policy, teacher = LogitInputs(params, hidden_BTD, config), LogitInputs(theirs, their_hidden_BTD, config)
            if exact:
                return token_divergence(policy, teacher, where_BT, where_BT, **chunks)[2].sum()
            ids_BTK = top_ids(policy, K, **chunks)
            logprob_BTK, _ = chosen_logprobs(policy, ids_BTK, where_BT, **chunks)
            return top_k_kl(logprob_BTK, their_logprob_BTK).sum()

        params = {"embed": jax.ShapeDtypeStruct((vocab, 16), jnp.float32)}
        hidden_BTD = jax.ShapeDtypeStruct((4, time, 16), jnp.float32)
        given = (params, hidden_BTD, params, hidden_BTD, jax.ShapeDtypeStruct((4, time, K), jnp.float32))
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, few = 64, 2048
    small, long, wide, both = used(short, few), used(4 * short, few), used(short, 4 * few), used(4 * short, 4 * few)
    logits = 4 * short * few * 4  # bytes of all logits in the smallest case
    assert both - long - wide + small < 0.05 * 9 * logits, (small, long, wide, both)
    assert both < 16 * logits / 4, (small, long, wide, both)
