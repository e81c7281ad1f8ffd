"""A reference that waits in the host's memory gives the same scores as a reference on the devices."""

import logging

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import podrl
from podrl.cluster.config import ClusterConfig, Role
from podrl.engine.config import RolloutConfig
from podrl.job.config import TINY, complete, parse
from podrl.mesh.build import make_mesh
from podrl.models import LoraConfig
from podrl.offload import HOST
from podrl.trainer.config import RLTrainingConfig


def _cluster(offload, rank=0):
    mesh = make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        training_config=RLTrainingConfig(eval_every_n_steps=0, max_steps=1, offload=offload),
        rollout_config=RolloutConfig(max_prompt_length=8, max_tokens_to_generate=8),
    )
    made = podrl.RLCluster(actor=TINY, cluster_config=config, lora=LoraConfig(rank=rank))
    made.keep_reference()
    return made


@pytest.mark.parametrize(("offload", "state"), [("reference", "device"), ("all", HOST)])
def test_a_reference_on_the_host_scores_to_the_same_bits(offload, state):
    tokens_BT, length_B = np.random.default_rng(0).integers(1, 300, (4, 16)), np.array([16, 9, 12, 16])
    here, there = _cluster("none"), _cluster(offload)
    expected, found = (c.get_ref_per_token_logps(tokens_BT, length_B) for c in (here, there))
    assert np.abs(expected).max() > 1
    np.testing.assert_array_equal(found, expected)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(there.actor.reference)} == {HOST}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(there.actor.params())} == {"device"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(there.state.opt_state) if x.ndim > 2} == {state}


def test_each_scoring_reads_a_copy_on_the_devices_and_none_compiles_after_the_first(monkeypatch, caplog):
    actor = _cluster("reference").actor
    of = {"tokens_BT": np.ones((4, 16), np.int32), "length_B": np.full(4, 16), "longest": 16, "reference": True}
    score, copies = actor._reference_logprobs, []

    def noted(params, batch):
        copies.append(params)
        return score(params, batch)

    monkeypatch.setattr(actor, "_reference_logprobs", noted)
    actor.sample_logprobs(**of)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        actor.sample_logprobs(**of)
    assert not [r.message for r in caplog.records if "ompil" in r.message]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(copies)} == {"device"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(actor.reference)} == {HOST}


def test_adapters_share_their_base_with_the_reference_on_the_devices():
    actor = _cluster("reference", rank=2).actor
    assert actor.reference is actor.frozen


def _job(algorithm, offload="reference", **groups):
    trainer = {"offload": offload, "max_steps": 1, "eval_every_n_steps": 0}
    return parse(ConfigDict(complete({"algorithm": algorithm, "trainer": trainer} | groups)).to_dict())


SELF_TAUGHT = {"grpo": {"teacher": "current", "teacher_coef": 1.0, "beta": 0.0}, "data": {"hint": "{answer}"}}


@pytest.mark.parametrize(
    ("algorithm", "offload", "groups", "reason"),
    [
        ("dr_grpo", "reference", {}, r"algorithm=dr_grpo with these .* no reference: set trainer\.offload='none'"),
        ("dr_grpo", "reference", {"model": {"reference": "tiny"}}, "=dr_grpo .* compares the policy with no reference"),
        ("orpo", "reference", {}, "algorithm=orpo .* compares the policy with no reference"),
        ("sft", "all", {}, r"algorithm=sft .* set trainer\.offload='optimizer'"),
        ("dpo", "reference", {"model": {"lora": {"rank": 2}}}, r"under adapters the reference is their base"),
        ("grpo", "reference", SELF_TAUGHT, r"teachers are not model\.reference"),
    ],
)
def test_a_job_without_a_reference_of_its_own_is_refused(algorithm, offload, groups, reason):
    with pytest.raises(ValueError, match=reason):
        _job(algorithm, offload, **groups)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo", "kto", "ppo"])
def test_jobs_with_a_reference_keep_it_on_the_host(algorithm):
    assert _job(algorithm).trainer.hosts_reference
