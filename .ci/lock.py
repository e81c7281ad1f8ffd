"""Writes the lock files of launch/: `python .ci/lock.py`. What the images and TPU VMs install, to the byte.

Versions are those of .ci/constraints.txt, so what CI tested; the hashes are those of every wheel that Linux on x86-64
takes on Python 3.11 to 3.13. For a package without a wheel (SOURCES) it is the hash of its source archive. Needs pip 23
or later and a package index.
"""

import atexit
import functools
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_17", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(24, 32)))
BASE = "requirements.lock"
# A file holds what its extras add to the base, and begins with the base.
LOCKS = {
    BASE: ("gcs", "hub", "tools", "agents"),
    "requirements-tpu.lock": ("gcs", "hub", "tools", "agents", "tpu"),
    "requirements-pathways.lock": ("gcs", "hub", "tools", "agents", "pathways"),
}
# Each has a file of what it adds to the base, to be installed beside one of those. Other extras of a pod add nothing to
# the base, or need a package that is C source without a wheel, which no image can compile (reasoning: pycosat).
BESIDE = ("math", "wandb", "mlflow", "openenv", "tfds")
# Packages that have no wheel. A host builds them without build isolation, which would fetch setuptools unhashed: the
# setuptools of the base, which is installed before, builds them.
SOURCES = ("promise",)


@functools.cache
def sources() -> tuple[str, dict[str, str]]:
    """Builds wheels of SOURCES; returns their directory, and the SHA-256 of each package's source archive."""
    folder, hashes = tempfile.mkdtemp(), dict[str, str]()
    atexit.register(shutil.rmtree, folder)
    for name in SOURCES:
        pip = [sys.executable, "-m", "pip"]
        of = ["--quiet", "--no-deps", "--no-binary=:all:", f"--constraint={ROOT / '.ci' / 'constraints.txt'}", name]
        subprocess.run([*pip, "download", f"--dest={folder}", *of], check=True)
        (archive,) = pathlib.Path(folder).glob(f"{name}-*.tar.gz")
        hashes[name] = hashlib.sha256(archive.read_bytes()).hexdigest()
        subprocess.run([*pip, "wheel", f"--wheel-dir={folder}", *of], check=True)
        archive.unlink()
    return folder, hashes


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Reads the requirements of pyproject.toml, and adds setuptools, which builds SOURCES."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        "setuptools",
        *(wanted for extra in extras for wanted in project["optional-dependencies"][extra]),
    ]


def resolve(extras: tuple[str, ...], python: str) -> dict[str, set[str]]:
    """'name==version' to the sha256 of the wheel that this Python takes."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", f"--python-version={python}", f"--target={folder}", f"--report={report}"]
        command += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
        built, archives = sources()
        command += [f"--find-links={built}"]
        command += [f"--constraint={ROOT / '.ci' / 'constraints.txt'}", *requirements(extras)]
        subprocess.run(command, check=True)
        installed = json.loads(report.read_text())["install"]
    return {
        f"{package['metadata']['name']}=={package['metadata']['version']}": {
            archives.get(package["metadata"]["name"].lower())
            or package["download_info"]["archive_info"]["hashes"]["sha256"]
        }
        for package in installed
    }


def lock(extras: tuple[str, ...]) -> dict[str, set[str]]:
    """'name==version' to the sha256 of all wheels that any of the Pythons takes."""
    found: dict[str, set[str]] = {}
    for python in PYTHONS:
        for package, hashes in resolve(extras, python).items():
            found.setdefault(package, set()).update(hashes)
    names = [package.split("==")[0] for package in found]
    assert len(names) == len(set(names)), "the Pythons disagree on a version: pin it in .ci/constraints.txt"
    return found


def main() -> None:
    """Writes all files."""
    base: dict[str, set[str]] = {}
    for name, extras in LOCKS.items():
        found = lock(extras)
        if name == BASE:
            base = found
        write(
            name, extras, {package: hashes for package, hashes in found.items() if name == BASE or package not in base}
        )
    for extra in BESIDE:
        found = lock((*LOCKS[BASE], extra))
        write(
            f"requirements-{extra}.lock",
            (extra,),
            {package: found[package] for package in found if package not in base},
        )


def write(name: str, extras: tuple[str, ...], packages: dict[str, set[str]]) -> None:
    """Writes a file; those of LOCKS but the base begin with it."""
    lines = [f"# podrl[{','.join(extras)}] on Linux, x86-64, Python {PYTHONS[0]} to {PYTHONS[-1]}: python .ci/lock.py"]
    lines += [f"-r {BASE}"] if name in LOCKS and name != BASE else []
    names = {package.split("==")[0].lower() for package in packages}
    lines += [f"--no-binary={one}" for one in SOURCES if one in names]
    for package in sorted(packages, key=str.lower):
        lines.append(" \\\n".join([package, *(f"    --hash=sha256:{one}" for one in sorted(packages[package]))]))
    (ROOT / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
