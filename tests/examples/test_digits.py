"""The digits example: its dataset, and a short run with two workers."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_runs import LIMIT_SECONDS, ROOT, run_example
from optional_packages import require

require("sklearn", "tensorflow_datasets")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Holds the prepared dataset. Whatever would look for a network meanwhile fails."""
    import digits_dataset

    def refuse(*arguments: Any, **_: Any) -> Any:
        raise AssertionError(f"a network was looked for: {arguments}")

    directory = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        digits_dataset.load("digits", str(directory))
        yield directory


def examples(data_dir: Path, split: str) -> list[dict[str, Any]]:
    import digits_dataset

    return list(digits_dataset.Digits(data_dir=str(data_dir)).as_dataset(split=split).as_numpy_iterator())


def test_every_image_is_in_one_split(data_dir: Path) -> None:
    train, test = examples(data_dir, "train"), examples(data_dir, "test")
    assert (len(train), len(test)) == (1442, 355)
    assert sorted(example["index"] for example in train + test) == list(range(1797))


def test_images_and_labels_are_those_of_scikit_learn(data_dir: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for example in examples(data_dir, "train") + examples(data_dir, "test"):
        image = example["image"]
        assert image.shape == (8, 8, 1) and image.dtype == "uint8"
        # 16 grey levels spread over 0..255, and back
        assert (abs(image[..., 0] * (16 / 255) - digits.images[example["index"]]) < 0.05).all()
        assert example["label"] == digits.target[example["index"]]


def test_held_out_images_are_a_fifth_of_each_digit(data_dir: Path) -> None:
    train, test = ([example["label"] for example in examples(data_dir, split)] for split in ("train", "test"))
    for digit in range(10):
        assert test.count(digit) == (train.count(digit) + test.count(digit)) // 5


def test_a_second_load_finds_the_same_data(data_dir: Path) -> None:
    import digits_dataset

    first, second = (
        [
            (image.tobytes(), label)
            for split in digits_dataset.load("digits", str(data_dir))
            for image, label in split.as_numpy_iterator()
        ]
        for _ in range(2)
    )
    assert first == second and len(first) == 1797


@pytest.mark.long
def test_processes_may_prepare_at_once(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); from digits_dataset import load; "
        f"print([len(split) for split in load('digits', {str(tmp_path)!r})])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0 and output.strip() == "[1442, 355]", errors


def test_mnist_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import digits_dataset

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    with pytest.raises(RuntimeError, match=r"(?s)mnist.*Received: .*Expected: .*tfdist run --network host"):
        digits_dataset.load("mnist", str(tmp_path))


@pytest.mark.multi_process
def test_two_workers_train_as_one_process_does(data_dir: Path) -> None:
    output = run_example("digits.py", "--epochs=3", f"--data_dir={data_dir}")
    # Progress once, by the chief, and the last line.
    assert re.findall(r"^(.*)Epoch \d/3", output, re.MULTILINE) == ["[0] "] * 3, output
    last = re.search(
        r"^\[0\] digits: 2 workers ([\d.]+) %, one process ([\d.]+) % held-out accuracy; "
        r"largest weight difference (\S+)$",
        output,
        re.MULTILINE,
    )
    assert last, output
    workers, one_process, difference = map(float, last.groups())
    assert workers == one_process and workers > 80
    assert difference < 1e-4
