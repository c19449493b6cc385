"""Runs each notebook in a kernel of this Python, and checks that none is committed with outputs."""

import gc
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import nbformat
import pytest
from child_environment import child_environment
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from notebook_files import FOLDER, paths, stripped

CELL_LIMIT_SECONDS = 900
ROOT = FOLDER.parents[1]

# The last line of each notebook.
LAST_LINES = {
    "compression": r"compression: powersgd:4 sent 1/(\d+) of the bytes and recognises ([\d.]+)%",
    "engines": r"engines: on Dask a worker was killed, weights bit-identical: (True); on Ray ([\d.]+)%",
    "multi_worker": r"multi-worker: a worker was killed, all were restarted; weights bit-identical: (True)",
    "pipeline": r"pipeline: 2 columns of 2 stages ([\d.]+)%, 2 split stages ([\d.]+)%, one device ([\d.]+)% of "
    r"held-out digits; largest weight difference (\S+)",
    "quick_start": r"quick start: (2) replicas ([\d.]+)%, one device ([\d.]+)% of held-out digits; largest weight "
    r"difference (\S+)",
    "recovery": r"recovery: weights bit-identical: (True), losses equal: (True)",
}
# Examples and other tests run what the long ones show: compression, workers, stages and recovery.
QUICK, LONG = ("quick_start",), ("compression", "engines", "multi_worker", "pipeline", "recovery")


class ThisPython(KernelSpecManager):
    """Provides one kernel, independent of installed ones."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`run(name)`: the notebook with its outputs. It runs once, in a new directory, without package downloads."""
    notebooks: dict[str, Any] = {}

    def execute(name: str) -> Any:
        if name not in notebooks:
            folder = tmp_path_factory.mktemp(name)
            notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
            kernel = AsyncKernelManager(kernel_spec_manager=ThisPython())
            client = NotebookClient(
                notebook, km=kernel, timeout=CELL_LIMIT_SECONDS, resources={"metadata": {"path": str(folder)}}
            )
            kept = {key: value for key, value in child_environment().items() if key != "MPLBACKEND"}
            places = {key: str(folder / key.lower()) for key in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")}
            nothing = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            client.execute(cleanup_kc=True, env={**kept, **places, **nothing})
            assert not kernel.has_kernel, "the kernel is still alive"
            del client, kernel
            with warnings.catch_warnings():  # both leave sockets to the garbage collector
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
            left = {path.name for path in folder.iterdir()} - {place.lower() for place in places}
            notebooks[name] = notebook, left
        return notebooks[name]

    return execute


def outputs(notebook: Any, cell_id: str) -> list[Any]:
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return cell.outputs


def printed(notebook: Any, cell_id: str | None = None) -> str:
    """The standard output of one cell or of all cells."""
    cells = [cell.id for cell in notebook.cells if cell.cell_type == "code"] if cell_id is None else [cell_id]
    found = [output for cell in cells for output in outputs(notebook, cell)]
    return "".join(output.text for output in found if output.output_type == "stream" and output.name == "stdout")


def last_line(notebook: Any, name: str) -> tuple[str, ...]:
    (line,) = re.findall(rf"^{LAST_LINES[name]}$", printed(notebook), re.MULTILINE)
    return line if isinstance(line, tuple) else (line,)


def test_every_notebook_has_a_last_line() -> None:
    assert [path.stem for path in paths()] == sorted(LAST_LINES) == sorted([*QUICK, *LONG])


@pytest.mark.multi_process
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_runs_to_its_last_line_without_leftovers(name: str, run: Any) -> None:
    notebook, left = run(name)
    assert last_line(notebook, name)
    assert not left


def test_quick_start_uses_the_cpu_and_equals_one_device(run: Any) -> None:
    notebook, _ = run("quick_start")
    assert printed(notebook, "strategy").startswith("MirroredStrategy, 2 replicas")
    _, replicas, one, difference = map(float, last_line(notebook, "quick_start"))
    assert replicas == one > 90 and difference < 1e-4


@pytest.mark.long
def test_compression_plots_all_methods(run: Any) -> None:
    notebook, _ = run("compression")
    assert [output.output_type for output in outputs(notebook, "plot")] == ["display_data"]
    assert "image/png" in outputs(notebook, "plot")[0].data
    rows = dict(re.findall(r"^(\S+) +[\d.]+ +([\d.]+)% +[\d.]+%$", printed(notebook, "table"), re.MULTILINE))
    assert list(rows) == ["uncompressed", "int8", "sign", "powersgd:4", "topk:0.01"]
    shares = [float(share) for share in rows.values()]
    assert shares[0] == 100 and all(share < 52 for share in shares[1:])
    divisor, accuracy = last_line(notebook, "compression")
    assert int(divisor) > 15 and float(accuracy) > 90


@pytest.mark.long
def test_recovery_resumes_in_the_middle_of_an_epoch(run: Any) -> None:
    notebook, _ = run("recovery")
    assert "interrupted after step 35" in printed(notebook, "interrupt")
    assert "FailureRecovery: resuming in epoch 2 of 4, after step 30" in printed(notebook, "again")
    assert re.search(r"^ +\d+ +92 +4 +1 .* complete\s*$", printed(notebook, "list"), re.MULTILINE)


@pytest.mark.long
def test_stages_equal_one_device(run: Any) -> None:
    notebook, _ = run("pipeline")
    assert re.search(r"^stage 1  .  F0 B0", printed(notebook, "strategy"), re.MULTILINE)
    assert "image/png" in outputs(notebook, "bytes")[0].data
    stages, split, one, difference = map(float, last_line(notebook, "pipeline"))
    assert stages == split == one > 80 and difference < 1e-4


@pytest.mark.long
def test_workers_train_fail_and_restart(run: Any) -> None:
    notebook, _ = run("multi_worker")
    assert re.findall(r"^\[(\d)\] Epoch 4/4$", printed(notebook, "train"), re.MULTILINE) == ["0"]
    accuracies = re.match(
        r"accuracies ([\d.]+)% and ([\d.]+)%; weights bit-identical: True", printed(notebook, "results")
    )
    assert accuracies and accuracies[1] == accuracies[2] and float(accuracies[1]) > 85
    error = printed(notebook, "error")
    assert error.startswith("Worker 1 of 2 failed: ZeroDivisionError: ")
    assert "    return number // (1 - cluster.detect().task.index)\n" in error  # the line of the cell
    assert "FailureRecovery: resuming in epoch 2 of 4" in printed(notebook, "restart")


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_is_committed_without_outputs(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == stripped(path.read_text(encoding="utf-8")), "run `make notebooks`"


def test_stripping_removes_outputs_and_metadata() -> None:
    text = (FOLDER / "quick_start.ipynb").read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.execution_count = 3
    code.outputs = [nbformat.v4.new_output("stream", text="said")]
    code.metadata["collapsed"] = True
    notebook.metadata["widgets"] = {"state": {}}
    assert stripped(nbformat.writes(notebook)) == text
    del code["source"]
    with pytest.raises(nbformat.ValidationError):
        stripped(nbformat.writes(notebook))


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_links_lead_to_files(path: Path) -> None:
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    links = [path.parent / link for link in re.findall(r"\]\(([^)#]+)", text)]
    links += [ROOT / name for name in re.findall(r"`(docs/[^`]+)`", text)]
    assert not [link for link in links if not link.exists()]
