"""A user's code that launch/ sends to the hosts: which files it sends, under which name, and what relative paths then
mean."""

import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import jax
import pytest
import yaml
from ml_collections import ConfigDict
from test_gke import FLAGS, check_schema, pod_spec

from launch import gke, submission, xpk
from podrl.job import describe, placement
from podrl.job.config import complete, parse, with_prompt_length
from podrl.job.config_file import find_config, load_config
from podrl.mesh.build import make_mesh
from podrl.runtime import bundle

CONFIG = """
from ml_collections import ConfigDict

import mine.lengths


def get_config():
    config = ConfigDict({"algorithm": "grpo", "data": {"path": "data/train.jsonl"}, "model": {"path": "tiny"}})
    config.reward = ConfigDict({"fns": ("mine/rewards.py:short",)})
    return config
"""


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """Writes files; keys are their paths below a directory."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def project(tmp_path) -> pathlib.Path:
    rewards = "def short(completions, **_):\n    return [0.0 for _ in completions]\n"
    files = {"mine/rewards.py": rewards, "mine/lengths.py": "LIMIT = 3\n", "mine/__init__.py": "", "run.py": CONFIG}
    files["data/train.jsonl"] = '{"question": "1+1?", "answer": "2"}\n' * 20
    return write(tmp_path / "project", files)


def names(code: submission.Code) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as tar:
        return set(tar.getnames())


def test_the_same_content_is_the_same_archive_whoever_makes_it_and_when(project, tmp_path):
    code = submission.read_code(project)
    assert names(code) == {"mine/__init__.py", "mine/rewards.py", "mine/lengths.py", "run.py", "data/train.jsonl"}
    again = tmp_path / "again"
    for name in sorted(code.files, reverse=True):
        (again / name).parent.mkdir(parents=True, exist_ok=True)
        (again / name).write_bytes(code.files[name])
        (again / name).chmod(0o600)
        os.utime(again / name, (1, 1))
    assert submission.read_code(again).archive == code.archive
    url = code.url("gs://b/run/")
    assert url == f"gs://b/run.code-{hashlib.sha256(code.archive).hexdigest()}.tar"
    (again / "run.py").chmod(0o700)
    assert submission.read_code(again).url("gs://b/run") != url
    write(again, {"run.py": CONFIG + "\n"})
    assert submission.read_code(again).url("gs://b/run") != url


def test_histories_caches_and_runs_stay_here(project):
    before = names(submission.read_code(project))
    here = (".git/config", "mine/.git", "mine/__pycache__/a.pyc", ".venv/bin/x.py", "runs/a/notes.txt", "b.pyc", ".env")
    # `out` is a run directory, which may have any name.
    write(project, dict.fromkeys((*here, "out/metrics.jsonl", "out/checkpoints/1/x.txt"), "x"))
    assert names(submission.read_code(project)) == before
    write(project, {"mine/runs/__init__.py": ""})  # a package called runs is code
    assert names(submission.read_code(project)) == {*before, "mine/runs/__init__.py"}


PATTERNS = """
# comment
*.log
!keep.log
/top.txt
build/
docs/*.txt
a/**/deep.py
**/cache
vendor/**
\\#odd
file[0-9].csv
file[!a-z]x.csv
sp?ce.md
trailing.txt\x20\x20
secret\\ *
x/y
"""
NAMES = [
    *(
        "a.log",
        "keep.log",
        "sub/keep.log",
        "sub/a.log",
        "top.txt",
        "sub/top.txt",
        "build/a.py",
        "sub/build/b.py",
        "build.py",
        "docs/a.txt",
    ),
    *(
        "docs/sub/a.txt",
        "sub/docs/a.txt",
        "a/deep.py",
        "a/b/deep.py",
        "a/b/c/deep.py",
        "deep.py",
        "cache/x.py",
        "sub/cache/y.py",
        "sub/cache.py",
    ),
    *(
        "vendor/x.py",
        "vendor/y/z.py",
        "sub/vendor/x.py",
        "#odd",
        "even",
        "file1.csv",
        "filea.csv",
        "file1x.csv",
        "fileax.csv",
        "space.md",
        "spce.md",
    ),
    *("trailing.txt", "x/y", "x/z", "sub/x/y", "own/a.txt", "own/b.txt", "own/sub/a.txt", "own/sub/c.log"),
]


def test_what_git_ignores_is_left_out(tmp_path):
    own = {".gitignore": PATTERNS, "own/.gitignore": "a.txt\n!c.log\n/b.txt\n"}
    write(tmp_path, dict.fromkeys(NAMES, "x") | own)
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run([*git, "ls-files", "-zo", "--exclude-standard"], capture_output=True, text=True, check=True)
    expected = set(filter(None, listed.stdout.split("\0")))
    assert 15 < len(expected) < len(NAMES) and names(submission.read_code(tmp_path)) == expected


def test_links_stay_in_the_directory(project, tmp_path):
    (project / "alias.py").symlink_to("mine/rewards.py")
    (project / "mine" / "all").symlink_to("../data")
    code = submission.read_code(project)
    assert code.links == {"alias.py": "mine/rewards.py", "mine/all": "../data"}
    target = bundle.unpack(_sent(code, tmp_path), tmp_path)
    assert (target / "alias.py").read_text() == (project / "mine" / "rewards.py").read_text()
    assert (target / "mine" / "all" / "train.jsonl").is_file()


@pytest.mark.parametrize("link", ["/etc/passwd", "../outside.py", "nothing.py", ".git/config", ".", "mine/../.."])
def test_links_to_elsewhere_are_refused(project, tmp_path, link):
    write(tmp_path, {"outside.py": ""})
    write(project, {".git/config": ""})
    (project / "link.py").symlink_to(link)
    with pytest.raises(ValueError, match=rf"link\.py is a symbolic link to {re.escape(link)}, which is not"):
        submission.read_code(project)
    (project / ".gitignore").write_text("link.py\n")
    submission.read_code(project)


def test_directories_that_are_no_code_are_refused(project, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be a directory"):
        submission.read_code(project / "run.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no file to send"):
        submission.read_code(tmp_path / "empty")
    os.mkfifo(project / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file"):
        submission.read_code(project)
    (project / "pipe").unlink()
    monkeypatch.setattr(submission, "CODE_BYTES", 3000)
    (project / "data" / "large.bin").write_bytes(bytes(3000))
    with pytest.raises(
        ValueError, match=r"the largest data/large\.bin \(0\.0 MiB\).*name what is not code in a \.gitig"
    ):
        submission.read_code(project)
    (project / ".gitignore").write_text("large.bin\n")
    assert "data/large.bin" not in names(submission.read_code(project))
    monkeypatch.setattr(submission, "CODE_FILES", 3)
    with pytest.raises(ValueError, match="has over 3 files"):
        submission.read_code(project)
    monkeypatch.undo()
    write(project, {"podrl/__init__.py": ""})
    with pytest.raises(ValueError, match="has a podrl of its own"):
        submission.read_code(project)


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        ("run.py", []),
        ("grpo_gemma.py", ["--config.reward.fns=mine/rewards.py:short"]),
        ("grpo_gemma.py", ["--config.reward.fns=('answer', './mine/rewards.py:short')"]),
        ("grpo_gemma.py", ["--config.data.path=data/train.jsonl", "--config.data.eval_path=data"]),
        ("grpo_gemma.py", ["--config.data.sources=({'path': 'data/train.jsonl'}, {'path': 'data'})"]),
        ("grpo_gemma.py", ["--config.env.servers=({'target': 'python mine/lengths.py'},)"]),
        ("grpo_gemma.py", ["--config.data.system_prompt=Answer as in notes.txt does."]),
        ("grpo_gemma.py", ["--config.model.path=Qwen/Qwen3-8B", "--config.data.path=hf:openai/gsm8k:main:train"]),
        ("/app/configs/own.py", []),
    ],
)
def test_relative_paths_lie_in_the_code(project, config, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths are looked up in the code, not here
    submission.check_job(config, extra, {}, code=submission.read_code(project))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--config.reward.fns=rewards.py:short"], r"names rewards\.py, which is not in --code=.*no such file"),
        (["--config.reward.fns=../here.py:f"], r"names \.\./here\.py, which is not in --code="),
        (["--config.data.path=here.jsonl"], r"data\.path=here\.jsonl is not in --code="),
        (["--config.data.path=mine/big.jsonl"], r"big\.jsonl is not in --code=.*leaves it out \(a \.gitignore"),
        (["--config.data.sources=({'path': 'gone/part'},)"], r"names gone/part, which is not in"),
        (["--config.eval.sets=({'path': 'test.jsonl'},)"], r"eval\.sets=.* names test\.jsonl, which is not in"),
        (["--config.env.system_prompt_file=say"], None),
        (["--config.env.system_prompt_file=say/it"], r"system_prompt_file=say/it is not in"),
        (["--config.model.path=./model"], r"model\.path=\./model is not in"),
        (["reward.fns=rewards.py:short"], r"reward\.fns=rewards\.py:short names rewards\.py"),
        (["--config.reward.fns", "rewards.py:short"], r"names rewards\.py"),
        (["-config.reward.fns=rewards.py:short"], r"names rewards\.py"),
    ],
)
def test_relative_paths_outside_the_code_are_refused(project, extra, message, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"here.py": "", "rewards.py": ""}))
    (tmp_path / "here.jsonl").touch()
    (project / "mine" / "big.jsonl").touch()
    (project / ".gitignore").write_text("big.jsonl\n")
    code = submission.read_code(project)
    if message is None:
        submission.check_job("grpo_gemma.py", extra, {}, code=code)
        return
    with pytest.raises(ValueError, match=message):
        submission.check_job("grpo_gemma.py", extra, {}, code=code)
    with pytest.raises(ValueError, match=r"is a path on this machine, which the hosts do not see: send code"):
        submission.check_job("grpo_gemma.py", extra, {})  # without --code no relative path is taken


def test_a_configuration_file_goes_along_with_what_it_names(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = submission.read_code(project)
    with pytest.raises(ValueError, match=r"--config=other\.py is not a configuration of podrl, and not in --code="):
        submission.check_job("other.py", [], {}, code=code)
    (project / ".gitignore").write_text("data\n")
    with pytest.raises(ValueError, match=r"data\.path=data/train\.jsonl is not in --code=.*leaves it out"):
        submission.check_job("run.py", [], {}, code=submission.read_code(project))


def _fake_gcloud(folder: pathlib.Path, monkeypatch) -> pathlib.Path:
    """Puts stand-ins on PATH: gcloud stores what is copied to a URL as a file, kubectl and xpk store their input and
    arguments. Returns the folder of these files."""
    kept = folder / "kept"
    kept.mkdir()
    program = folder / "gcloud"
    program.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "storage cp -" ] && cat >{kept}/$(basename "$4")\n')
    program.chmod(0o755)
    for name in ("kubectl", "xpk"):
        (folder / name).write_text(f'#!/bin/sh\ncp /dev/stdin {kept}/{name}; printf "%s\\n" "$@" >>{kept}/{name}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return kept


def test_the_launchers_send_it_and_say_so(project, tmp_path, monkeypatch, capfd):
    kept = _fake_gcloud(tmp_path, monkeypatch)
    sent = submission.read_code(project).url("gs://bucket/run")
    own = ["--config=run.py", *FLAGS[1:], f"--code={project}"]
    assert gke.main([*own, "--apply", "--dry_run"]) == 0 and not any(kept.iterdir())
    shown = capfd.readouterr().out
    assert f"goes to {sent} when this is submitted" in shown
    document = next(one for one in yaml.safe_load_all(shown) if one["kind"] == "JobSet")
    check_schema(document)
    for role in ("trainer", "rollout"):
        assert f"--code={sent}" in pod_spec(document, role)["containers"][0]["command"]
    assert gke.main([*own, "--apply"]) == 0
    archive = (kept / sent.rpartition("/")[2]).read_bytes()
    assert hashlib.sha256(archive).hexdigest() in sent and sent in (kept / "kubectl").read_text()
    (kept / sent.rpartition("/")[2]).unlink()
    words = ["--cluster=c", "--machine=v6e:4x4", "--config=run.py", "--workdir=gs://bucket/run", "--image=i"]
    assert xpk.main([*words, f"--code={project}"]) == 0
    assert (kept / sent.rpartition("/")[2]).read_bytes() == archive and f"--code={sent}" in (kept / "xpk").read_text()
    (tmp_path / "gcloud").write_text("#!/bin/sh\nexit 1\n")
    (kept / "kubectl").unlink()
    assert gke.main([*own, "--apply"]) == 1 and not (kept / "kubectl").exists()
    assert f"{sent} cannot be written" in capfd.readouterr().err
    assert gke.main([*own, "--", "--code=gs://b/x.tar"]) == 1
    assert "--code=gs://b/x.tar stands after --" in capfd.readouterr().err


def _sent(code: submission.Code, folder: pathlib.Path) -> str:
    """Writes the archive to the file from which a host unpacks it; returns the file's path."""
    file = folder / code.url("run").rpartition("/")[2]
    file.write_bytes(code.archive)
    return str(file)


def test_a_host_imports_and_reads_from_the_code_alone(project, tmp_path):
    url = _sent(submission.read_code(project), tmp_path)
    program = (
        "import os, sys; from podrl.runtime import bundle\n"
        f"bundle.enter({url!r}, os.environ, workdir='gs://b/run')\n"
        "import mine.lengths; assert mine.lengths.LIMIT == 3 and open('data/train.jsonl').read()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import mine.rewards, podrl, os; print(os.getcwd())'])\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path(done.stdout.strip()).parent == tmp_path and project.name not in done.stdout


def test_the_page_about_a_run_names_its_code():
    values = complete(load_config(find_config("grpo_gemma.py")).to_dict())
    found = parse(with_prompt_length(ConfigDict(values).to_dict()))
    mesh, url = make_mesh("data=1", jax.devices()[:1]), f"gs://b/run.code-{'0' * 64}.tar"
    on = placement.Meshes(mesh, mesh, mesh, mesh)
    assert any(line.endswith(url) for line in describe.about_job(found, on, code=url).lines)
    assert not any("code-" in line for line in describe.about_job(found, on).lines)


def test_a_host_refuses_what_was_not_sent(project, tmp_path):
    code = submission.read_code(project)
    url = _sent(code, tmp_path)
    with pytest.raises(ValueError, match=r"--workdir='runs/a' is relative"):
        bundle.enter(url, {}, workdir="runs/a")
    with pytest.raises(ValueError, match=r"must be RUN\.code-SHA256\.tar"):
        bundle.unpack(str(tmp_path / "code.tar"), tmp_path)
    archive = bytearray(code.archive)
    archive[600] ^= 1
    pathlib.Path(url).write_bytes(archive)
    with pytest.raises(ValueError, match="not the one in its name: the archive was damaged or replaced"):
        bundle.unpack(url, tmp_path)
    pathlib.Path(url).unlink()
    with pytest.raises(ValueError, match="does not exist"):
        bundle.unpack(url, tmp_path)
    assert not list(tmp_path.glob("podrl-code-*"))


@pytest.mark.parametrize(("name", "link"), [("../out.py", ""), ("a", "/etc"), ("a", "../../out"), ("/dev/x", "")])
def test_a_host_unpacks_nothing_outside_its_directory(tmp_path, name, link):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
        tar.addfile(entry)
    file = tmp_path / f"run.code-{hashlib.sha256(out.getvalue()).hexdigest()}.tar"
    file.write_bytes(out.getvalue())
    inner = tmp_path / "inner"
    inner.mkdir()
    if name.startswith("/"):  # an absolute path becomes a path inside the directory
        assert (bundle.unpack(str(file), inner) / "dev" / "x").is_file()
        return
    with pytest.raises(ValueError, match="is not an archive that launch/ made"):
        bundle.unpack(str(file), inner)
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "inner"}
