"""The real servers: TensorFlow's own strategy trains with them, and continues when a worker is killed."""

import pytest

SCRIPT = """
    import tensorflow as tf

    def worker_pid():
        "The process of worker 0, among the launcher's children."
        launcher = os.getppid()
        for pid in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            try:
                environ = pathlib.Path(f"/proc/{pid}/environ").read_text()
            except OSError:  # it has just ended
                continue
            if '"task": {"type": "worker", "index": 0}' in environ:
                return int(pid)
        return None

    def addresses_answer():
        for job, addresses in json.loads(os.environ["TF_CONFIG"])["cluster"].items():
            for address in addresses if job != "chief" else ():
                try:
                    host, port = address.split(":")
                    socket.create_connection((host, int(port)), 1).close()
                except OSError:
                    return False
        return True

    wait_until(addresses_answer)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)
    add = tf.function(lambda: total.assign_add(1.0))

    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    first = worker_pid()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: worker_pid() not in (None, first))
    wait_until(addresses_answer)
    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    print("total", float(total.numpy()) >= 20.0)
    os._exit(0)
"""


@pytest.mark.long
def test_training_continues_after_a_worker_was_killed(run, tmp_path):
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": str(tmp_path)}  # for what TensorFlow leaves there
    ended = run(SCRIPT, "--parameter-servers", "1", workers=1, env=env)
    assert ended.code == 0, "\n".join(ended.err)
    assert "[chief] total True" in ended.out
    [line] = [line for line in ended.said if line.startswith("worker 0 failed")]
    assert line.endswith("training waits for it; restart in 1 s")
