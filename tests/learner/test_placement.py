"""The devices that each role of a configuration gets, in one process and in pods."""

import contextlib

import jax
import pytest

from podrl.cluster.config import ClusterConfig, Role
from podrl.config import build
from podrl.engine.config import RolloutConfig
from podrl.job import placement
from podrl.job.placement import RoleConfig, RolesConfig, meshes
from podrl.mesh.build import check_one_host, describe_mesh, local_mesh, make_mesh, spreads_copies
from podrl.runtime.roles import Hosts
from podrl.trainer.config import RLTrainingConfig


class Chip:
    """A device of some host, with the attributes that the mesh builder and jax's Mesh read."""

    platform, device_kind, client = "cpu", "cpu", None

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number


def pod(monkeypatch, hosts, per_host, here=0):
    """Fakes jax's devices of `hosts` hosts and makes this process host `here`; the first half are trainer hosts."""
    chips = [Chip(host, host * 2048 + i) for host in range(hosts) for i in range(per_host)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    monkeypatch.setattr(jax, "local_devices", lambda: [c for c in chips if c.process_index == here])
    return Hosts(tuple(range(hosts // 2)), tuple(range(hosts // 2, hosts)))


def roles(**given):
    return build(RolesConfig, {name: {"mesh": mesh} for name, mesh in given.items()}, "config.roles")


def placed(mesh):
    return describe_mesh(mesh), [d.id for d in mesh.devices.flat]


def test_auxiliary_models_share_unless_they_are_given_devices():
    found = meshes(RolesConfig())
    assert found.critic is found.trainer and found.reward is found.rollout
    found = meshes(roles(critic="fsdp=2", reward="data=1", trainer="fsdp=3"))
    assert [placed(m)[1] for m in (found.trainer, found.rollout, found.critic, found.reward)] == [
        *([0, 1, 2], [3, 4], [5, 6], [7])
    ]
    assert describe_mesh(found.critic) == "fsdp=2" and describe_mesh(found.rollout) == "data=2"


def test_an_evaluation_host_has_the_mesh_of_a_rollout_host(monkeypatch):
    pod(monkeypatch, 1, 4)
    hosts = Hosts((0,), (1, 2), eval=(3, 4))
    at = lambda role, **given: placed(meshes(build(RolesConfig, given, "r"), hosts, split=True, role=role).rollout)  # noqa: E731
    given = {"rollout": {"mesh": "data=4,tensor=2"}, "eval": {"hosts": "3-4"}}
    assert at("eval", **given) == at("rollout", **given) == ("data=2,tensor=2", [0, 1, 2, 3])
    found = meshes(build(RolesConfig, {"eval": {"hosts": "3"}}, "r"))  # a dry run in one process
    assert len(found.rollout.devices.flat) == 2


def test_a_mesh_of_some_devices_is_refused_with_the_key_that_divides_them():
    few = RolesConfig(RoleConfig("fsdp=2"), colocated=True)
    with pytest.raises(ValueError, match=r"fsdp=2 needs 2 devices, .* roles\.colocated=False divides them\.$"):
        meshes(few)


def test_colocated_roles_may_lay_the_critic_out_otherwise():
    found = meshes(RolesConfig(critic=placement.AuxiliaryConfig("fsdp=2,tensor=4"), colocated=True))
    assert describe_mesh(found.critic) == "fsdp=2,tensor=4" and describe_mesh(found.trainer) == "fsdp=8"
    assert set(found.critic.devices.flat) == set(found.trainer.devices.flat) == set(found.rollout.devices.flat)


def test_every_host_of_a_pod_gives_equally_many(monkeypatch):
    hosts = pod(monkeypatch, 4, 4)
    found = meshes(roles(critic="fsdp=4", reward="data=2"), hosts)
    assert placed(found.trainer) == ("fsdp=4", [0, 1, 2048, 2049])
    assert placed(found.critic) == ("fsdp=4", [2, 3, 2050, 2051])
    assert placed(found.rollout) == ("data=6", [4096, 4097, 4098, 6144, 6145, 6146])
    assert placed(found.reward) == ("data=2", [4099, 6147])


def test_split_clusters_see_their_own_part(monkeypatch):
    hosts = pod(monkeypatch, 2, 4)
    given = roles(critic="fsdp=2,tensor=2", reward="data=2,tensor=1")
    trainers = meshes(given, Hosts((0, 1), (2, 3)), split=True, role="trainer")
    assert placed(trainers.trainer) == ("fsdp=4", [0, 1, 2048, 2049])
    assert placed(trainers.critic) == ("fsdp=2,tensor=2", [2, 3, 2050, 2051])
    pod(monkeypatch, 1, 4)
    rollout = meshes(given, Hosts((0, 1), (2, 3)), split=True, role="rollout")
    assert placed(rollout.rollout) == ("data=3", [0, 1, 2]) and placed(rollout.reward) == ("one device", [3])
    assert hosts.count == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"critic": "fsdp=3"}, r"roles.critic.mesh='fsdp=3' needs 3 devices, and each of 2 hosts.*a multiple of 2"),
        ({"critic": "fsdp=8"}, r"takes 4 devices of every host, and one host has only 4"),
        ({"reward": "data=-1"}, r"roles.reward.mesh='data=-1' leaves a size open.*or 'rollout'"),
        ({"critic": "rollout"}, r"roles.critic.mesh='rollout' must be 'trainer', whose hosts it is on"),
        ({"reward": "fdsp=2"}, r"roles.reward.mesh='fdsp=2' names axis 'fdsp'"),
    ],
)
def test_what_a_pod_cannot_give_is_refused(given, message, monkeypatch):
    hosts = pod(monkeypatch, 4, 4)
    with pytest.raises(ValueError, match=message):
        meshes(roles(**given), hosts)


def test_a_reward_model_over_hosts_that_see_only_themselves(monkeypatch):
    pod(monkeypatch, 1, 4)
    with pytest.raises(ValueError, match=r"roles.reward.mesh='tensor=2' spreads one copy of the weights"):
        meshes(roles(reward="tensor=2"), Hosts((0,), (1, 2)), split=True, role="rollout")


def test_a_critic_among_the_rollouts_devices_is_refused_from_python_too():
    trainer, rollout = make_mesh("fsdp=4", jax.devices()[:4]), make_mesh("data=4", jax.devices()[4:])
    training, generation = RLTrainingConfig(eval_every_n_steps=0), RolloutConfig()
    for critic, fine in ((trainer, True), (make_mesh("tensor=4", jax.devices()[:4]), True), (rollout, False)):
        on = {Role.ACTOR: trainer, Role.ROLLOUT: rollout, Role.CRITIC: critic}
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match=r"Role.CRITIC on devices of Role.R"):
            ClusterConfig(role_to_mesh=on, training_config=training, rollout_config=generation)


def test_settings_that_cannot_be():
    with pytest.raises(
        ValueError, match=r"RolesConfig.reward.mesh='data=2' must be 'rollout' with RolesConfig.colocated"
    ):
        RolesConfig(reward=placement.AuxiliaryConfig("data=2"), colocated=True)
    with pytest.raises(ValueError, match=r"config\.roles\.critic has no key 'hosts': a critic and teachers are on"):
        build(RolesConfig, {"critic": {"mesh": "fsdp=2", "hosts": "1"}}, "config.roles")


def test_a_replica_over_two_hosts_is_a_row_of_the_rollout_mesh(monkeypatch):
    hosts = pod(monkeypatch, 4, 2)
    mesh = meshes(RolesConfig(rollout=RoleConfig("tensor=4")), hosts).rollout
    assert spreads_copies(mesh) and local_mesh(mesh, 2).devices.tolist() == local_mesh(mesh, 3).devices.tolist()
    with pytest.raises(ValueError, match=r"roles.reward.mesh='tensor=4' spreads one copy of the weights over 2 hosts"):
        check_one_host(mesh, key="roles.reward.mesh")
    own = meshes(RolesConfig(), hosts).rollout
    assert not spreads_copies(own) and [d.process_index for d in local_mesh(own, 3).devices.flat] == [3, 3]
    check_one_host(local_mesh(own, 3), key="roles.reward.mesh")


def test_a_copy_that_shares_a_host_with_another_is_refused(monkeypatch):
    pod(monkeypatch, 2, 3)
    with pytest.raises(ValueError, match=r"= 2 devices, and process 0 has 3: one of these numbers must divide"):
        local_mesh(make_mesh("data=3,tensor=2", jax.devices()), 0, key="roles.rollout.mesh")
