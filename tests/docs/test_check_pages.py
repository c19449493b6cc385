"""`docs/building/check_pages.py` finds nothing in the pages, and finds what each of its rules is about in others."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "building")
        import check_pages

        yield check_pages


@pytest.fixture
def found(checks: ModuleType, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns what a rule finds in some files."""

    def run(rule: str, files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return [str(finding) for finding in checks.RULES[rule](checks.Pages(tmp_path))]

    return run


def test_pages_keep_the_rules(checks: ModuleType) -> None:
    found = checks.findings(checks.Pages(ROOT))
    assert not found, "\n".join(map(str, found))


def test_the_repository_is_read(checks: ModuleType) -> None:
    pages = checks.Pages(ROOT)
    assert {"README.md", "docs/quick_start.md", "docs/api/callbacks.md", "examples/README.md"} <= set(pages.markdown)
    assert {"tfdist/cluster/tf_config.py", "callbacks/failure_recovery.py"} <= set(pages.sources)
    assert {"mkdocs.yml", "Makefile", "examples/notebooks/quick_start.ipynb", "benchmarks/parity.py"} <= set(
        pages.texts
    )
    modules = sys.modules
    assert len(modules["check_messages"].all_messages(pages)) > 200
    read = "\n".join(pages.markdown.values())
    assert {command for command, _ in modules["check_commands"].COMMAND.findall(read)} == {
        *("run", "plan", "doctor", "checkpoints")
    }
    assert len(modules["check_words"].TERM.findall(pages.markdown["docs/glossary.md"])) > 50
    assert len(modules["check_code_blocks"].BLOCK.findall(read)) > 20


PAGE = "# Title\n\n## A heading, of `two` words\n\n"


@pytest.mark.parametrize(
    ("link", "mistake"),
    [
        ("page.md", None),
        ("#a-heading-of-two-words", None),
        ("https://x.org", None),
        ("gone.md", "no such file"),
        ("/page.md", "no such file"),
        ("page.md#gone", "no such heading; there are ['a-heading-of-two-words', 'title']"),
    ],
)
def test_links(found: Callable[..., list[str]], link: str, mistake: str | None) -> None:
    shown = found("links", {"docs/page.md": f"{PAGE}```\n[a](b.md)\n```\n[a]({link})\n"})
    assert shown == ([f"docs/page.md:8: {link}: {mistake}"] if mistake else [])


def test_named_files(found: Callable[..., list[str]]) -> None:
    text = "`train.py`, `checkpoint/shard.py`, `sh*.py`\n`checkpoint/stores.py`, `ard.py`\n"
    shown = found("named_files", {"tfdist/checkpoint/shard.py": "", "a.md": text})
    assert shown == ["a.md:2: `checkpoint/stores.py`: no such file", "a.md:2: `ard.py`: no such file"]


def test_titles(found: Callable[..., list[str]]) -> None:
    pages = {"a.md": "## None\n", "b.md": "# One\n```\n# code\n```\n# Two\n", "c.md": "# One\n"}
    assert [finding.rpartition(". ")[0] for finding in found("titles", pages)] == [
        "a.md:1: no title",
        "b.md:5: second title '# Two'",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("`tfdist run --worker 2 train.py`", "tfdist run --worker: no such option"),
        ("```\ntfdist run --workers 2 train.py --epochs 3\n```", None),
        ("tfdist doctor --workers 2  # --no-option", None),
        ("`tfdist checkpoints DIR --verfy`", "tfdist checkpoints --verfy: no such option"),
        ("`make demos` and `make demo`, we make docs", "make demos: no such target"),
        ("`python benchmarks/gone.py`, [a](../examples/digits.py)", "benchmarks/gone.py: no such script"),
    ],
)
def test_commands(found: Callable[..., list[str]], text: str, mistake: str | None) -> None:
    shown = found("commands", {"a.md": f"# A\n{text}\n", "Makefile": "demo:\n\ttrue\n", "examples/digits.py": ""})
    assert shown == ([f"a.md:2: {mistake}"] if mistake else [])


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("from tfdist.strategies import NoSuchStrategy", "NoSuchStrategy"),
        ("import tfdist.nowhere", "nowhere"),
        ("from tfdist.callbacks import FailureRecovery as F\nF('d', every_step=1)", "every_step"),
        ("FailureRecovery('d', every_step=1)", "every_step"),
        ("import tfdist\ntfdist.strategies.MirroredStrategy(compress='int8')", "compress"),
        ("import tfdist\ntfdist.strategies.MirrorStrategy()", "MirrorStrategy"),
        ("from tfdist.compression import PowerSGD\nPowerSGD(1, 2, 3, 4, 5, 6, 7)", "too many"),
        ("strategy.ranks", "ranks"),
        ("s = ParameterServerStrategy()\ns.micro_batchez", "micro_batchez"),
        ("if:", "line 1 of the block: invalid syntax"),
        (
            "strategy.rank; strategy.gather(x, axis=0); model.fit(x, callbacks=[FailureRecovery('d', every_steps=1)])",
            "",
        ),
        ("s = ParameterServerStrategy(mode=Synchronous(backup_workers=1))\ns.worker_stats", ""),
        ("import horovod.tensorflow.keras as hvd\nhvd.init()\nstrategy.ranks", ""),
    ],
)
def test_code_blocks(found: Callable[..., list[str]], source: str, mistake: str) -> None:
    shown = found("code_blocks", {"a.md": f"text\n\n```python\n{source}\n```\n"})
    assert len(shown) == bool(mistake)
    assert all(finding.startswith("a.md:4: ") and mistake in finding for finding in shown)


def test_converted_program(found: Callable[..., list[str]]) -> None:
    program = "fit(_PASSES)\nevaluate(model)\n"
    page = "```python\nbefore()\n```\nAfter,\n```python\nfit(2)  # passes\nevaluate(models)\n```\n"
    files = {"examples/migrating/horovod_after.py": program, "docs/migrating_from_horovod.md": page}
    assert found("converted_program", files) == [
        "docs/migrating_from_horovod.md:7: examples/migrating/horovod_after.py has no line 'evaluate(models)'"
    ]


def test_exports(found: Callable[..., list[str]], checks: ModuleType) -> None:
    folder = "docs/api"
    files = {f"{folder}/{page.name}": page.read_text(encoding="utf-8") for page in (ROOT / folder).glob("*.md")}
    files[f"{folder}/a.md"] = "::: tfdist.cluster.Gone\n"
    files[f"{folder}/callbacks.md"] = files[f"{folder}/callbacks.md"].replace(
        "::: tfdist.callbacks.FailureRecovery", ""
    )
    assert [finding.partition(". ")[0] for finding in found("exports", files)] == [
        "docs/api/a.md:1: no module exports tfdist.cluster.Gone",
        "docs/api/:1: no page shows tfdist.callbacks.FailureRecovery",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ValueError('It is wrong. Received: 1.')", "It is wrong"),
        ("raise ValueError(f'`{x}` is wrong. Received: {x}')", "… is wrong"),
        ("def f():\n    return UsageError('It is wrong.')", "It is wrong"),
        ("raise tf.errors.UnavailableError(None, None, f'A server {x} is lost. Go.')", "A server … is lost"),
        ("raise LinkClosed('it does not answer')", "it does not answer"),
        ("raise RuntimeError('not in rounds')", None),
        ("raise AssertionError('Unreachable.')", None),
        ("_log.warning('It is late: %s', x)", "It is late: …"),
        ("console.say(f'{x} is frozen: {y}')", "… is frozen: …"),
        ("def f(x):\n    return f'{x} is late. Expected: {x}'", "… is late"),
        ("def f():\n    '''Says. Received: this.'''", None),
        ("raise OSError(1, f'{x}: {y}')", None),
    ],
)
def test_messages_have_a_row(found: Callable[..., list[str]], source: str, message: str | None) -> None:
    files = {"tfdist/a.py": source}
    shown = found("rows_of_messages", files)
    line = source.count("\n") + 1
    assert [finding.partition(". ")[0] for finding in shown] == (
        [f"tfdist/a.py:{line}: no row in docs/errors.md"] if message else []
    )
    assert found("rows_of_messages", files | {"docs/errors.md": f"| `{message}` | a |\n" if message else ""}) == []


def test_rows_have_a_message(found: Callable[..., list[str]]) -> None:
    own = "| `It is wrong.` | a |\n| `It is gone.` | a |\n| `It is wrong` | a |\n"
    page = f"{own}## Messages of TensorFlow and Keras\n| `b` | a |\n"
    assert found("rows_of_messages", {"tfdist/a.py": "raise ValueError('It is wrong.')", "docs/errors.md": page}) == [
        "docs/errors.md:2: no message of tfdist is 'It is gone'",
        "docs/errors.md:3: second row of 'It is wrong'",
    ]


def test_terms(found: Callable[..., list[str]]) -> None:
    glossary = "# G\n| **resume** | a |\n| **round** | around |\n| **resume** | a |\n"
    assert found("terms", {"docs/glossary.md": glossary, "a.md": "It is resumed, on the ground."}) == [
        "docs/glossary.md:3: no page uses 'round'",
        "docs/glossary.md:4: second row of 'resume'",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It begins anew.", ["1: 'anew'. Expected: again"]),
        ("One.\n# Two tells\n# of three.", ["2: 'tells of'. Expected: report"]),
        ('f"This is "\n    f"no compressor"', ["1: 'is no compressor'. Expected: is not a"]),
        ("There is no message. It is no longer used. The whole batch. `going_on`", []),
        ("Training goes\non.", ["1: 'goes on'. Expected: continue, resume"]),
        ("a stall; the tall crews", []),
    ],
)
def test_phrases(found: Callable[..., list[str]], text: str, shown: list[str]) -> None:
    assert found("phrases", {"benchmarks/a.py": text}) == [f"benchmarks/a.py:{finding}" for finding in shown]


def test_pictures(found: Callable[..., list[str]]) -> None:
    names = ("attempt_restart", "gradient_life", "rooms", "what_is_sent")
    drawn = {
        f"docs/images/{name}.svg": (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8") for name in names
    }
    drawn["docs/images/rooms.svg"] += "\n"
    drawn["docs/images/other.svg"] = '<svg width="10" height="10"><rect x="8" y="0" width="3" height="1"/></svg>'
    assert [finding.partition(". ")[0].partition(" {")[0] for finding in found("pictures", drawn)] == [
        "docs/images/rooms.svg:1: differs",
        "docs/images/other.svg:1: docs/building/pictures.py does not draw it",
        "docs/images/other.svg:1: lies outside of the picture:",
    ]
