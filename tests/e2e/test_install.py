"""pip installs one top-level package with the configurations and launch scripts in it; its commands work from any
directory."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.optimised,
    pytest.mark.nightly("pyproject.toml", "setup.py", "requirements.lock"),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SEEN = "import pathlib, podrl, podrl.launchers.gke as gke; print(pathlib.Path(podrl.__file__).parent, gke.__name__)"


def run(*command, cwd, fails=False):
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copies the sources that a build needs, because setuptools would leave its own files in this checkout."""
    copy = tmp_path_factory.mktemp("copy") / "podrl"
    copy.mkdir()
    for name in ("podrl", "configs", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", checkout, f"--wheel-dir={folder}", cwd=folder)
    (found,) = folder.glob("podrl-*.whl")
    return found


def pip(python, command, *args, cwd):
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, command, *offline, *args, cwd=cwd)


def environment(folder):
    """Makes a virtual environment without podrl that has this environment's other packages; returns its Python and
    site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    return folder / "bin" / "python", site


def works(python, empty):
    empty.mkdir()
    out = run(python, "-m", "podrl.launch", "--config=grpo_gemma.py", "--dry_run", cwd=empty)
    assert "grpo" in out
    assert "Did you mean 'grpo_gemma.py'?" in run(
        python, "-m", "podrl.launch", "--config=grpo_gema.py", "--dry_run", cwd=empty, fails=True
    )
    assert list(empty.iterdir()) == []


def test_a_wheel_holds_one_top_level_name_and_every_file(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert {name.split("/")[0] for name in names} == {
        "podrl",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }
    homes = {"podrl": "podrl", "podrl/configs": "configs", "podrl/launchers": "launch"}
    wanted = {
        f"{home}/{path.relative_to(ROOT / folder)}"
        for home, folder in homes.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= set(names)
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata and any(name.endswith("licenses/LICENSE") for name in names)


def test_a_wheel_runs_from_an_empty_directory(wheel, tmp_path):
    python, site = environment(tmp_path / "venv")
    pip(python, "install", wheel, cwd=tmp_path)
    assert run(python, "-c", SEEN, cwd=tmp_path).split() == [str(site / "podrl"), "podrl.launchers.gke"]
    works(python, tmp_path / "empty")
    script = site / "podrl" / "launchers" / "tpu_vm.sh"
    said = run("bash", script, "my-tpu", "z-1", "--dry_run", "--", "--config=grpo_gemma.py", cwd=tmp_path, fails=True)
    assert "this copies a checkout of podrl" in said


def test_an_editable_install_runs_from_an_empty_directory(checkout, tmp_path):
    python, _ = environment(tmp_path / "venv")
    pip(python, "install", "--editable", checkout, cwd=tmp_path)
    for folder in (tmp_path, checkout, checkout.parent):  # the checkout is the folder `podrl` of checkout.parent
        assert run(python, "-c", SEEN, cwd=folder).split() == [str(checkout / "podrl"), "podrl.launchers.gke"]
    assert "--config" in run(python, "-m", "podrl.launch", "--help", cwd=checkout.parent)
    works(python, tmp_path / "empty")
