"""The environment variables of the workers."""

from collections.abc import Mapping

from tfdist import cluster
from tfdist.launch.cli.node_options import TOKEN_VARIABLE
from tfdist.launch.process_roles import cluster_spec
from tfdist.launch.processes.cores_and_ports import ThreadShare, usable_cores
from tfdist.launch.processes.run_policy import AttemptStart


class WorkerEnvironments:
    """Builds the complete environment of each process of this host.

    Args:
        environ: The launcher's environment, which the workers inherit, except for the token of the rendezvous.
        start_timeout: Seconds to wait for peers.
        threads_per_worker: Threads of each process if the user set it.
    """

    def __init__(self, environ: Mapping[str, str], *, start_timeout: float, threads_per_worker: int | None) -> None:
        self._environ = environ
        self._start_timeout, self._threads_per_worker = start_timeout, threads_per_worker

    def __call__(self, start: AttemptStart) -> dict[int, dict[str, str]]:
        """Returns the environments of an attempt, by rank."""
        roles = start.local_roles
        share = ThreadShare(len(roles), usable_cores(), self._threads_per_worker, self._environ)
        spec = cluster_spec(start.roles.values(), start.addresses)
        common = {
            **{name: value for name, value in self._environ.items() if name != TOKEN_VARIABLE},
            **share.environment(),
            "PYTHONUNBUFFERED": "1",
            "TFDIST_START_TIMEOUT": f"{self._start_timeout:g}",
            "TFDIST_RUN_ID": start.run_id,
            "TFDIST_ATTEMPT": str(start.attempt),
            "TFDIST_FULL_WORKERS": str(start.full_workers),
        }
        configs = {rank: cluster.ClusterConfig(spec, role.task) for rank, role in roles.items()}
        return {rank: {**common, "TF_CONFIG": config.to_tf_config()} for rank, config in configs.items()}
