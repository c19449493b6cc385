"""Checks manifests of Kubeflow against the models of its packages, and plays the parts of its operators.

The models are generated from the schemas of the custom resources: `kubeflow.training` for the Training Operator 1.9,
`kubeflow_trainer_api` for Trainer 2. Neither rejects everything by itself: the former has types in tables only, the
latter ignores unknown fields. Their functions import them: every process of the tests imports this module, one checks
manifests, and the packages take a second and a half.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = {"str": str, "int": int, "bool": bool}
_COLLECTION = re.compile(r"(list|dict)[\[(](?:str, )?(.*)[\])]")
TFJOB_PORT = 2222


def check_tfjob(manifest: Mapping[str, Any]) -> None:
    """Checks a TFJob.

    Raises:
        ValueError: Names the first field that the schema does not have, or whose type is another one.
    """
    problem = next(_problems(manifest, "KubeflowOrgV1TFJob", "TFJob"), None)
    if problem is not None:
        raise ValueError(problem)


def _problems(value: Any, kind: str, path: str) -> Iterator[str]:
    from kubeflow.training import models as operator_models

    collection = _COLLECTION.fullmatch(kind)
    model = getattr(operator_models, kind, None)
    if kind == "V1PodTemplateSpec":
        yield from _pod_problems(value, path)
    elif collection is not None:
        if not isinstance(value, {"list": list, "dict": dict}[collection[1]]):
            yield f"{path}: {value!r} is no {collection[1]}"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _problems(item, collection[2], f"{path}.{key}")
    elif model is not None:
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no object"
            return
        types = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
        for key, item in value.items():
            if key not in types:
                yield f"{path}: unknown field {key!r}"
            else:
                yield from _problems(item, types[key], f"{path}.{key}")
    elif kind in _TYPES and type(value) is not _TYPES[kind]:
        yield f"{path}: {value!r} is no {kind}"


def _pod_problems(template: Any, path: str) -> Iterator[str]:
    import kubernetes_validate
    import kubernetes_validate.utils

    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
    try:
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.utils.ValidationError as error:
        where = ".".join(map(str, [path, *error.absolute_path]))
        yield f"{where}: {error.message}"


def check_trainer(manifest: Mapping[str, Any]) -> None:
    """Checks a TrainJob or a TrainingRuntime.

    Raises:
        ValueError: A field has another type, or the schema does not have it.
    """
    from kubeflow_trainer_api import models as trainer_models

    model = getattr(trainer_models, f"TrainerV1alpha1{manifest['kind']}").from_dict(json.loads(json.dumps(manifest)))
    lost = next(_differences(manifest, model.to_dict(), manifest["kind"]), None)
    if lost is not None:
        raise ValueError(f"unknown field {lost}")


def _differences(given: Any, read: Any, path: str) -> Iterator[str]:
    """Yields the fields that the model did not keep: it ignores unknown ones."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key in read:
                yield from _differences(value, read[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from _differences(one, other, f"{path}.{index}")
    elif given != read:
        yield f"{path}: {given!r}, read as {read!r}"


def container_of(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the container of a pod with this name."""
    [container] = [one for one in pod["containers"] if one["name"] == name]
    return container


def operator_variables(tfjob: Mapping[str, Any], namespace: str = "default") -> dict[tuple[str, int], dict[str, str]]:
    """Returns the variables that the Training Operator sets in the container of each pod, by task."""
    name, specs = tfjob["metadata"]["name"], tfjob["spec"]["tfReplicaSpecs"]
    cluster = {
        kind.lower(): [
            f"{name}-{kind.lower()}-{index}.{namespace}.svc:{TFJOB_PORT}" for index in range(spec.get("replicas", 1))
        ]
        for kind, spec in specs.items()
    }
    return {
        (job, index): {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}, "environment": "cloud"})
        }
        for job, addresses in cluster.items()
        for index in range(len(addresses))
    }


def trainer_variables(runtime: Mapping[str, Any], trainjob: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the variables of the container of each pod of a TrainJob, by node.

    Trainer overwrites those of the runtime by those of the job. A JobSet gives its pods labels and host names, an
    Indexed Job their index.
    """
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"]["trainer"]
    labels = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"]}
    found = {}
    for variable in container_of(replicated["template"]["spec"]["template"]["spec"], "node").get("env", []):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        found[variable["name"]] = labels[label[1]] if label else variable["value"]
    found |= {variable["name"]: variable["value"] for variable in trainer.get("env", [])}
    return [
        {**found, "HOSTNAME": f"{name}-{replicated['name']}-0-{index}", "JOB_COMPLETION_INDEX": str(index)}
        for index in range(trainer["numNodes"])
    ]
