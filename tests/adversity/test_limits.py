"""User code sees no secret of the job and stays within its limits on the machine; a model's index may only name the
model's own files."""

import json
import os
import pathlib
import struct
import subprocess
import sys

import pytest
from waits import PATIENCE_S

from podrl.models.tensor_files import scan_directory
from podrl.rewards.compose import RewardConfig, RewardError, Rewards
from podrl.workers.user_code import Limits, forget, is_secret

# A user's reward functions: the first writes down its environment and limits, each of the others needs more than a
# limit allows.
FUNCTIONS = """
import json, os, pathlib, resource

HERE = pathlib.Path(__file__).parent


def look(prompts, completions, **fields):
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    (HERE / "seen.json").write_text(json.dumps({"environment": dict(os.environ), "limits": limits}))
    return [0.0] * len(completions)


def needs_a_token(prompts, completions, **fields):
    return [float(os.environ["MY_SERVICE_TOKEN"])] * len(completions)


def memory(prompts, completions, **fields):
    return [float(len(bytearray(300 << 20)))] * len(completions)


def file(prompts, completions, **fields):
    with (HERE / "large").open("wb") as out:
        for _ in range(8):
            out.write(bytes(1 << 20))
    return [0.0] * len(completions)
"""
SECRETS = {
    "PODRL_SECRET": "s3",
    "PODRL_SECRET_FILE": "/s",
    "HF_TOKEN": "h",
    "WANDB_API_KEY": "w",
    "JUDGE_KEY": "j",
    "AWS_SECRET_ACCESS_KEY": "a",
    "GOOGLE_APPLICATION_CREDENTIALS": "/g",
    "my_password": "p",
}
HARMLESS = {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "PODRL_NOTE": "n"}


def rewards(folder: pathlib.Path, name: str, **limits) -> list:
    (folder / "users.py").write_text(FUNCTIONS)
    config = RewardConfig(fns=(f"{folder}/users.py:{name}",), workers=1, deadline_s=20.0, limits=Limits(**limits))
    with Rewards(config) as made:
        return made.score(["p"], ["c"], {}).tolist()


def test_reward_functions_see_no_secret_and_have_limits(tmp_path, monkeypatch):
    for name, value in {**SECRETS, **HARMLESS}.items():
        monkeypatch.setenv(name, value)
    rewards(tmp_path, "look", environment=("HF_TOKEN",))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert {n for n in SECRETS if n in seen["environment"]} == {"HF_TOKEN"}  # allowed by `environment`
    assert not set(SECRETS.values()) - {"h"} & set(seen["environment"].values())
    assert HARMLESS.items() <= seen["environment"].items()
    limits, mib = seen["limits"], 1 << 20
    assert limits["RLIMIT_DATA"] == [Limits().memory_mb * mib] * 2
    assert limits["RLIMIT_FSIZE"] == [Limits().file_mb * mib] * 2
    assert limits["RLIMIT_CORE"] == [0, 0]
    soft, hard = limits["RLIMIT_NPROC"]
    assert soft == hard > Limits().processes


@pytest.mark.parametrize(
    ("name", "limits", "said"),
    [
        ("memory", {"memory_mb": 256}, r"MemoryError(?s:.*)reward\.limits\.memory_mb=256"),
        ("file", {"file_mb": 4}, r"File too large(?s:.*)reward\.limits\.file_mb=4"),
        ("needs_a_token", {}, r"KeyError: 'MY_SERVICE_TOKEN'(?s:.*)name what they need in reward\.limits\.environment"),
    ],
)
def test_a_function_that_meets_a_limit_is_told_the_key(name, limits, said, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "2.5")
    with pytest.raises(RewardError, match=said):
        rewards(tmp_path, name, **limits)
    enough = {"memory_mb": 2048, "file_mb": 64, "environment": ("MY_SERVICE_TOKEN",)}
    assert len(rewards(tmp_path, name, **enough)[0]) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not hold root to a number of processes")
def test_a_function_cannot_fill_the_process_table(tmp_path):
    program = """
import os, sys
from podrl.workers.user_code import Limits
Limits(processes=20).apply()
count = 0
try:
    for count in range(40):
        if not os.fork():
            os.read(0, 1)
            os._exit(0)
except BlockingIOError:
    print("refused", count)
"""
    done = subprocess.run([sys.executable, "-c", program], input="", capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused"), done.stderr


def test_the_jobs_secret_cannot_be_asked_for():
    with pytest.raises(ValueError, match=r"Limits\.environment names PODRL_SECRET, which no code of users may see"):
        Limits(environment=("PODRL_SECRET",))
    assert all(map(is_secret, SECRETS)) and not any(map(is_secret, HARMLESS))


def test_a_forgotten_secret_is_gone_from_what_the_kernel_shows():
    program = """
import os, pathlib
from podrl.workers.user_code import forget
here = pathlib.Path("/proc/self/environ")
assert b"s3cret-text" in here.read_bytes()
forget(os.environ, "PODRL_SECRET")
assert "PODRL_SECRET" not in os.environ
assert b"s3cret-text" not in here.read_bytes() and b"NEXT=whole" in here.read_bytes()
"""
    environment = os.environ | {"PODRL_SECRET": "s3cret-text", "NEXT": "whole"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_S)
    other = {"PODRL_SECRET": "x"}
    forget(other, "PODRL_SECRET")  # a mapping that is not this process's environment
    assert other == {}


def test_hidden_secrets_stay_in_this_process_throughout():
    """Another thread can still read a token while a worker is started."""
    program = """
import os, pathlib
from podrl.workers.user_code import hide_secrets
set_, puts = os.putenv, []
def put(name, value):
    assert os.environ["MY_TOKEN"] == "s3cret-text"
    puts.append(name)
    set_(name, value)
os.putenv, os.unsetenv = put, None  # a variable that is taken out, even for a moment, raises a TypeError
hide_secrets()
assert b"s3cret-text" not in pathlib.Path("/proc/self/environ").read_bytes() and os.environ["MY_TOKEN"] == "s3cret-text"
hide_secrets()
assert puts.count(b"MY_TOKEN") == 1
"""
    environment = os.environ | {"MY_TOKEN": "s3cret-text"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_S)


def test_a_worker_cannot_read_secrets_in_its_parents_environment(tmp_path):
    (tmp_path / "reads.py").write_text(
        "import os\n"
        "def parents(prompts, completions):\n"
        "    shown = open(f'/proc/{os.getppid()}/environ', 'rb').read()\n"
        "    return [float(b's3cret-text' in shown), float(b'NEXT=whole' in shown)]\n"
    )
    program = f"""
import os
from podrl.rewards.compose import RewardConfig, Rewards
with Rewards(RewardConfig(fns=({str(tmp_path / "reads.py") + ":parents"!r},), workers=1)) as rewards:
    assert rewards.score(["p", "q"], ["x", "y"], {{}}).tolist() == [[0.0, 1.0]]
assert os.environ["MY_API_KEY"] == os.getenv("MY_API_KEY") == "s3cret-text"  # the job itself keeps it
"""
    environment = os.environ | {"MY_API_KEY": "s3cret-text", "NEXT": "whole"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("file", ["../outside.safetensors", "{outside}", "a/../../outside.safetensors", "..", "", 3])
def test_a_weight_map_names_only_files_beside_it(file, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    model = tmp_path / "model"
    (model / "a").mkdir(parents=True)
    file = file.format(outside=outside) if isinstance(file, str) else file
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match=r"index\.json says that tensor w is in .*only name files that lie beside it"):
        scan_directory(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": ["w"]}')
    with pytest.raises(ValueError, match="is not a safetensors index"):
        scan_directory(model)
