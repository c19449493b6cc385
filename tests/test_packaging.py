"""Opens the wheel and the sdist: everything is in them, nothing else is, and the wheel works."""

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import tfdist

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("strategies", "callbacks")


def run(*command: str | Path, cwd: Path) -> str:
    # -P and no PYTHONPATH: the checkout must not stand in for what was installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, output: Path) -> Path:
    """Builds with the setuptools of this environment: no network."""
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", output, source, cwd=output.parent)
    (built,) = output.iterdir()
    return built


def install(python: str | Path, release: Path, *options: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *options, release, cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clean clone of the present state holds, links as links."""
    clean = tmp_path_factory.mktemp("checkout")
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(*git, cwd=ROOT).split("\0")):
        if os.path.lexists(ROOT / name):
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clean / name, follow_symlinks=False)
    return clean


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("built") / "sdist")


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def expected_files(checkout: Path) -> set[str]:
    """Every source file of the package under the name it is imported by."""
    sources = {str(file.relative_to(checkout)) for file in (checkout / "tfdist").rglob("*.py")}
    for link in LINKS:
        sources |= {f"tfdist/{file.relative_to(checkout)}" for file in (checkout / link).rglob("*.py")}
    return sources | {"tfdist/py.typed", "tfdist/requirements.txt"}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
    names = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert names == expected_files(checkout)
    for link in LINKS:
        assert f"tfdist/{link}/__init__.py" in names


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml", "tfdist"} <= {file.name for file in source.iterdir()}
    rebuilt, original = contents(build("wheel", source, tmp_path / "wheel")), contents(wheel)
    assert rebuilt.keys() == original.keys()
    # RECORD lists the others' checksums in the order in which the directories were read.
    assert [name for name in original if rebuilt[name] != original[name] and not name.endswith("/RECORD")] == []


def test_metadata(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("tfdist", tfdist.__version__)
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).startswith("# tfdist")
    assert set(metadata.get_all("Provides-Extra", [])) == {"examples", "notebook", "test", "benchmark", "docs", "dev"}


def test_requirements(metadata: email.message.Message) -> None:
    from packaging.requirements import Requirement

    stated = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist", [])) if r.marker is None}
    lines = (line for line in (ROOT / "tfdist" / "requirements.txt").read_text().splitlines() if line[:1] not in "#")
    assert {r.name: r.specifier for r in map(Requirement, lines)} == {n: r.specifier for n, r in stated.items()}
    assert stated.keys() == {"tensorflow", "keras", "absl-py", "packaging", "safetensors", "xxhash"}
    for name in ("tensorflow", "keras"):
        assert {specifier.operator for specifier in stated[name].specifier} == {">=", "<"}


def test_pyproject_holds_the_build_system_alone() -> None:
    import tomllib

    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"build-system"}


_PROGRAM = """
import keras, numpy as np, tfdist
from tfdist.callbacks import GradientAccumulation
from tfdist.strategies import MultiWorkerMirroredStrategy

strategy = MultiWorkerMirroredStrategy(compression="int8")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones([8, 4]), np.ones([8, 1]), batch_size=4, verbose=0, callbacks=[GradientAccumulation(2)])
print("trained", strategy.num_replicas_in_sync, model.optimizer.iterations.numpy(), tfdist.__file__)
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.long)])
def test_a_release_works_in_an_environment_of_its_own(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nothing is there but what it depends on, which is lent by this environment: there may be no network."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python3*/site-packages")
    # A .pth file puts a directory on the path; the .pth files in that, an editable install's, do nothing.
    site.joinpath("lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    release = request.getfixturevalue(kind)
    install(python, release, "--no-build-isolation", "--ignore-installed", cwd=tmp_path)
    assert run(environment / "bin" / "tfdist", "--version", cwd=tmp_path) == f"tfdist {tfdist.__version__}\n"
    if kind == "sdist":  # of which the same wheel is built, see above
        return
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    said = run(environment / "bin" / "tfdist", "run", "--workers", "2", script, cwd=tmp_path)
    assert sorted(line for line in said.splitlines() if "trained" in line) == [
        f"[{rank}] trained 2 1 {site / 'tfdist' / '__init__.py'}" for rank in range(2)
    ]


def test_the_workflow_runs_what_everybody_runs_on_all_supported_versions() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert re.findall(r'"(3\.\d+)"', workflow) == classifiers


def test_installed_wheel_imports_without_tensorflow(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install(sys.executable, wheel, "--target", target, cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
import tfdist, tfdist.launch.main, tfdist.cluster, tfdist.versions
assert tfdist.__file__.startswith({str(target)!r}), tfdist.__file__
assert tfdist.versions.tested_ranges()
loaded = [name for name in ("tensorflow", "keras") if name in sys.modules]
import importlib.util
for name in ("strategies", "callbacks"):
    assert importlib.util.find_spec("tfdist." + name).origin.startswith({str(target)!r})
print(tfdist.__version__, loaded)
"""
    assert run(sys.executable, "-P", "-c", program, cwd=tmp_path).split() == [tfdist.__version__, "[]"]
    command = (target / "bin" / "tfdist").read_text()
    assert "from tfdist.launch.main import main" in command
    assert not any((target / link).exists() for link in LINKS)
