"""A stand-in for gcloud: records its calls, and runs the commands for N workers in N directories of this machine.

In the directory FAKE_TPU_ROOT, calls are appended to `calls.jsonl`, and `w0`, `w1`, ... are the workers' homes; a
folder named after a TPU holds the homes of that TPU's workers. The metadata server of worker N answers under
http://FAKE_TPU_METADATA/wN. Copies to gs:// go to the storage emulator at STORAGE_EMULATOR_HOST.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request


def main(words: list[str]) -> int:
    root = pathlib.Path(os.environ["FAKE_TPU_ROOT"])
    with (root / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[:2] == ["storage", "cp"]:
        bucket, _, name = words[3].removeprefix("gs://").partition("/")
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        url = f"{os.environ['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket}/o?{query}"
        content = pathlib.Path(words[2]).read_bytes()
        urllib.request.urlopen(urllib.request.Request(url, content, method="POST"), timeout=30).close()
        return 0
    if words[1:4] == ["instance-groups", "managed", "list-instances"]:
        assert any(word.startswith("--zone=") for word in words)
        sys.stdout.write("".join(f"{path.name}\n" for path in root.glob("w*")))
        return 0
    if words[1] in ("ssh", "scp"):  # to one instance; its name is that of its home
        host = next(word for word in words[2:] if re.match(r"w\d", word))
        words = ["compute", "tpus", "tpu-vm", *words[1:], f"--worker={host.partition(':')[0]}"]
    assert words[:3] == ["compute", "tpus", "tpu-vm"], words
    verb, rest = words[3], words[4:]
    flags = dict(word[2:].split("=", 1) for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    if verb == "describe":
        sys.stdout.write("READY\tHEALTHY\n")
        return 0
    assert flags["zone"], words
    own = root / names[-1].partition(":")[0]
    root = own if own.is_dir() and not re.match(r"w\d", own.name) else root
    homes = sorted(path for path in root.iterdir() if path.is_dir() and path.name.startswith("w"))
    homes = [home for home in homes if flags["worker"] in ("all", home.name, home.name[1:])]
    assert homes, words
    if verb == "scp":
        source, (_, target) = names[0], names[1].split(":")
        for home in homes:
            shutil.copy(source, home / target)
        return 0
    assert verb == "ssh", words

    def run(home: pathlib.Path) -> int:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "GCE_METADATA_IP": f"{os.environ['FAKE_TPU_METADATA']}/{home.name}",
            "PODRL_TPU_LOCK_FILE": str(home / "libtpu_lockfile"),
            "PODRL_TPU_DEVICES": str(home / "dev"),
            "PODRL_RESTART_DELAY": "0",
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
            "PODRL_PROCESS_INDEX": home.name.removeprefix("w"),  # read only if the test sets the platform to local
        }
        return subprocess.run(["bash", "-c", flags["command"]], cwd=home, env=environment, check=False).returncode

    with concurrent.futures.ThreadPoolExecutor(len(homes)) as pool:
        codes = list(pool.map(run, homes))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
