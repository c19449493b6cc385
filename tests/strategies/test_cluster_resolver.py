"""The start timeout of strategies: the argument, the environment variable, and the default."""

import pytest

from tfdist.strategies.cluster_resolver import check_workers_run_the_script, start_timeout_of


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "0", "-3"])
def test_start_timeout_variable_is_checked(monkeypatch, value):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"variable TFDIST_START_TIMEOUT. Received: TFDIST_START_TIMEOUT='{value}'"):
        start_timeout_of(None)
    assert start_timeout_of(7) == 7


def test_start_timeout_by_default(monkeypatch):
    monkeypatch.delenv("TFDIST_START_TIMEOUT", raising=False)
    assert start_timeout_of(None) == 300
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "2.5")
    assert start_timeout_of(None) == 2.5


@pytest.mark.parametrize(("job", "option"), [("worker", "--chief"), ("ps", "--parameter-servers")])
def test_servers_of_a_chief_do_not_train(monkeypatch, job, option):
    """The chief would wait for them until its start timeout."""
    spec = {"chief": ["a:1"], "worker": ["a:2"], job: ["a:3"]}
    monkeypatch.delenv("TFDIST_RUN_ID", raising=False)
    check_workers_run_the_script(spec)  # of another launcher, whose workers run the script
    monkeypatch.setenv("TFDIST_RUN_ID", "f00d")
    check_workers_run_the_script({"worker": ["a:1", "a:2"]})
    with pytest.raises(ValueError, match=f"from tfdist run {option}. Expected: workers alone. .* without {option}"):
        check_workers_run_the_script(spec)
