"""The machine table: worked shapes, refusals, and agreement with xpk's own table where xpk is installed."""

import json
import subprocess

import pytest
import real_xpk

from launch import machines

ONE_CHIP = ("1x1", "1x1x1")


@pytest.mark.parametrize(
    ("spec", "chips", "hosts", "count", "accelerator", "xpk_type"),
    [
        ("v4:2x2x4", 16, 4, 1, "tpu-v4-podslice", "v4-2x2x4"),
        ("v5e:4x4", 16, 4, 1, "tpu-v5-lite-podslice", "v5litepod-4x4"),
        ("v5e:16x16*4", 256, 64, 4, "tpu-v5-lite-podslice", "v5litepod-16x16"),
        ("v5p:4x4x8", 128, 32, 1, "tpu-v5p-slice", "v5p-4x4x8"),
        ("v6e:2x4*2", 8, 2, 2, "tpu-v6e-slice", "v6e-2x4"),
        ("v6e:2x2", 4, 1, 1, "tpu-v6e-slice", "v6e-2x2"),
        ("tpu7x:2x2x1*3", 4, 1, 3, "tpu7x", "tpu7x-2x2x1"),
        ("tpu7x-1t:1x1x1*2", 1, 1, 2, "tpu7x", "tpu7x-1x1x1"),
        ("v6e-1t:1x1", 1, 1, 1, "tpu-v6e-slice", "v6e-1x1"),
    ],
)
def test_shapes(spec, chips, hosts, count, accelerator, xpk_type):
    slices = machines.parse_slices(spec, "--trainer")
    assert (slices.chips, slices.hosts, slices.count) == (chips, hosts, count)
    assert slices.machine.accelerator == accelerator
    assert slices.xpk_type == xpk_type


def test_eight_chip_hosts_make_one_host_of_the_same_topology():
    assert machines.parse_slices("v6e-8t:2x4", "--rollout").hosts == 1
    assert machines.parse_slices("v5e-1t:1x1*8", "--rollout").hosts == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("v6e", r"--trainer=v6e is not MACHINE:TOPOLOGY\[\*SLICES\]"),
        ("v6e:4x4*", "is not MACHINE"),
        ("v6e:4x4*0", "asks for 0 slices"),
        ("v5p:0x4x4", "has a side without chips"),
        ("v9:4x4", "names machine 'v9': known are v4, v5e-1t, v5e"),
        ("v6e:4x4x4", "a v6e topology has 2 numbers, as v6e:2x2"),
        ("v5p:4x4", "a v5p topology has 3 numbers, as v5p:2x2x1"),
        ("v6e:3x4", "v6e comes as 2x2, 2x4, 4x4"),
        ("v6e:32x16", "has 512 chips: the largest v6e slice has 256"),
        ("v6e-8t:4x4", "has 16 chips: the largest v6e-8t slice has 8"),
        ("v6e-8t:2x2", "ct6e-standard-8t comes as one host of 2x4 only"),
        ("v5p:4x6x8", "v5p comes as 2x2x1, 2x2x2, 2x2x4, 2x4x4, or with every number a multiple of 4"),
    ],
)
def test_refusals(spec, message):
    with pytest.raises(ValueError, match=message):
        machines.parse_slices(spec, "--trainer")


@pytest.mark.parametrize("spec", ["v6e-8t:2x4", "v5e:2x2", "v5e-1t:1x1"])
def test_machines_xpk_does_not_know(spec):
    with pytest.raises(ValueError, match=r"use launch\.gke"):
        _ = machines.parse_slices(spec, "--machine").xpk_type


# This program prints every TPU slice that xpk knows, by xpk's name.
TABLE = """
import json
from xpk.core.system_characteristics import UserFacingNameToSystemCharacteristics as table
fields = ("topology", "gke_accelerator", "gce_machine_type", "chips_per_vm", "vms_per_slice")
print(json.dumps({name: [getattr(system, field) for field in fields] for name, system in table.items()}))
"""


def test_table_agrees_with_xpk():
    done = subprocess.run([str(real_xpk.interpreter()), "-c", TABLE], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    ours = {}
    for machine in machines.MACHINES.values():
        for name, (topology, *_) in theirs.items():
            if name == f"{machine.xpk_prefix}-{topology}" and (topology in ONE_CHIP) == (machine.max_chips == 1):
                slices = machines.parse_slices(f"{machine.name}:{topology}", "--machine")
                shape = [machine.chips_per_host, slices.hosts]
                ours[slices.xpk_type] = [topology, machine.accelerator, machine.machine_type, *shape]
    generations = {machine.xpk_prefix for machine in machines.MACHINES.values()} - {""}
    expected = {
        name: system
        for name, system in theirs.items()
        if name.partition("-")[0] in generations and name.partition("-")[2] == system[0]
    }
    assert generations == {"v4", "v5litepod", "v5p", "v6e", "tpu7x"} and len(expected) > 1000
    assert ours == expected
