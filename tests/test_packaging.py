"""The wheel and the sdist contain every source file and nothing else, and the installed wheel works."""

import contextlib
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
from packaging.requirements import Requirement

import tfdist
from tfdist.versions import oldest_supported

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("strategies", "callbacks")


def run(*command: str | Path, cwd: Path) -> str:
    # -P and no PYTHONPATH: Python must import the installed package, not the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, output: Path) -> Path:
    """Builds with the setuptools of this environment, because there may be no network."""
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", output, source, cwd=output.parent)
    (built,) = output.iterdir()
    return built


def install(release: Path, *options: str | Path, cwd: Path, python: str | Path = sys.executable) -> None:
    """Installs into the environment of `python`, which needs no pip."""
    command = [sys.executable, "-m", "pip", "--python", python, "install"]
    run(*command, "--quiet", "--no-deps", "--no-index", *options, release, cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a clean clone of the present state; symbolic links stay links."""
    clean = tmp_path_factory.mktemp("checkout")
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(*git, cwd=ROOT).split("\0")):
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, or another test's
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
    """Every source file of the package, under the name by which it is imported."""
    sources = {str(file.relative_to(checkout)) for file in (checkout / "tfdist").rglob("*.py")}
    for link in LINKS:
        sources |= {f"tfdist/{file.relative_to(checkout)}" for file in (checkout / link).rglob("*.py")}
    return sources | {"tfdist/py.typed", "tfdist/requirements.txt"}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_wheel_contains_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
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
    # RECORD lists the checksums of the other files in the order in which the directories were read.
    assert [name for name in original if rebuilt[name] != original[name] and not name.endswith("/RECORD")] == []


def test_metadata(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("tfdist", tfdist.__version__)
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).startswith("# tfdist")
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *{"tensorflow", "cpu", "cuda", "ray", "spark", "dask"},
        *{"examples", "notebook", "plan", "remote", "test", "benchmark", "docs", "dev"},
    }


def requirements_of(metadata: email.message.Message, extra: str = "") -> dict[str, Requirement]:
    """What pip installs with the wheel, or what it adds for one extra, by name."""
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    plain = {need.name: need for need in needs if need.marker is None}
    with_extra = (need for need in needs if need.marker is not None and need.marker.evaluate({"extra": extra}))
    return {need.name: need for need in with_extra} if extra else plain


def test_requirements(metadata: email.message.Message) -> None:
    stated = requirements_of(metadata)
    lines = (line for line in (ROOT / "tfdist" / "requirements.txt").read_text().splitlines() if line[:1] not in "#")
    assert {r.name: r.specifier for r in map(Requirement, lines)} == {n: r.specifier for n, r in stated.items()}
    # Without TensorFlow, and without upper bounds, pip replaces no TensorFlow that is there, and a new one installs.
    assert stated.keys() == {"keras", "absl-py", "packaging", "safetensors", "xxhash"}
    assert {bound.operator for need in stated.values() for bound in need.specifier} == {">="}
    assert stated["keras"].specifier == oldest_supported("keras")


@pytest.mark.parametrize(
    ("extra", "distribution", "extras"),
    [("tensorflow", "tensorflow", set()), ("cpu", "tensorflow-cpu", set()), ("cuda", "tensorflow", {"and-cuda"})],
)
def test_an_extra_brings_tensorflow(
    metadata: email.message.Message, extra: str, distribution: str, extras: set[str]
) -> None:
    ((name, need),) = requirements_of(metadata, extra).items()
    assert (name, need.extras, need.specifier) == (distribution, extras, oldest_supported("tensorflow"))


@pytest.mark.parametrize("extra", ["examples", "notebook", "plan", "benchmark", "docs", "dev"])
def test_the_other_extras_of_users_leave_tensorflow_alone(metadata: email.message.Message, extra: str) -> None:
    assert not {name for name in requirements_of(metadata, extra) if name in {"keras", "tensorflow", "tensorflow-cpu"}}


def test_pyproject_contains_only_the_build_system() -> None:
    import tomllib

    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"build-system"}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment with the dependencies of this one, so that no network is needed."""
    created = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", created, cwd=tmp_path)
    (site,) = created.glob("lib/python3*/site-packages")
    # A .pth file adds a directory to the path. The .pth files in that directory have no effect.
    site.joinpath("dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return created


def install_release(release: Path, environment: Path) -> None:
    """Installs a wheel or sdist, and checks the command and the origin of the package."""
    python, cwd = environment / "bin" / "python", environment.parent
    install(release, "--no-build-isolation", "--ignore-installed", cwd=cwd, python=python)
    assert run(environment / "bin" / "tfdist", "--version", cwd=cwd) == f"tfdist {tfdist.__version__}\n"
    origin = run(python, "-P", "-c", "import tfdist; print(tfdist.__file__)", cwd=cwd).strip()
    assert Path(origin).is_relative_to(environment)


@pytest.mark.long  # the installed command and the converted program are also tested apart
@pytest.mark.multi_process
def test_the_wheel_runs_the_converted_horovod_program(wheel: Path, environment: Path, tmp_path: Path) -> None:
    """The wheel alone, without the checkout, trains `examples/migrating/horovod_after.py` on two workers."""
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `examples`")
    install_release(wheel, environment)
    script = ROOT / "examples" / "migrating" / "horovod_after.py"
    arguments = "--epochs=3", f"--data_dir={tmp_path / 'data'}", f"--directory={tmp_path}"
    output = run(environment / "bin" / "tfdist", "run", "--workers", "2", script, *arguments, cwd=tmp_path)
    result = re.search(r"^\[0\] 2 workers: held-out loss ([\d.]+), accuracy ([\d.]+) %$", output, re.MULTILINE)
    assert result and float(result[2]) > 70, output
    assert "[1] 2 workers" not in output
    assert (tmp_path / "model.keras").is_file()
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 3


@pytest.mark.long  # test_sdist_builds_the_same_wheel covers most of it
def test_the_sdist_installs(sdist: Path, environment: Path) -> None:
    install_release(sdist, environment)


def test_the_workflow_runs_make_test_on_all_supported_versions() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert re.findall(r'"(3\.\d+)"', workflow) == classifiers


def test_installed_wheel_imports_without_tensorflow(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install(wheel, "--target", target, cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(target)!r})
import tfdist, tfdist.launch.cli.main, tfdist.cluster, tfdist.versions
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
    assert "from tfdist.launch.cli.main import main" in command
    assert not any((target / link).exists() for link in LINKS)
