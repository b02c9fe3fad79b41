"""The MPIJob of examples/kubernetes, by the schema that Kubeflow's MPI operator publishes."""

import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/mpijob.yaml"
SCHEMA = yaml.safe_load(Path(__file__).with_name("mpijob_v2beta1.yaml").read_text())
TYPES = {"object": dict, "integer": int, "string": str}


@pytest.fixture
def spec():
    return yaml.safe_load(MANIFEST.read_text())["spec"]


def faults(value, schema, path="spec"):
    """Yield the places at which ``value`` breaks ``schema``, as the API server checks it."""
    if not isinstance(value, TYPES[schema["type"]]):
        yield f"{path}: no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: none of {schema['enum']}"
    if schema["type"] == "integer":
        least, most = schema.get("minimum", value), schema.get("maximum", value)
        if not least <= value <= most:
            yield f"{path}: out of range"
    if schema["type"] == "object" and "properties" in schema:
        yield from (
            f"{path}.{name}: missing" for name in schema.get("required", ()) if name not in value
        )
        for name, part in value.items():
            if name in schema["properties"]:
                yield from faults(part, schema["properties"][name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: unknown"


def test_the_manifest_fits_the_published_schema(spec):
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert list(faults(spec, SCHEMA)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda s: s.update(slotsPerWorker=0), "spec.slotsPerWorker: out of range"),
        (lambda s: s.update(hosts="a"), "spec.hosts: unknown"),
        (lambda s: s["mpiReplicaSpecs"].pop("Launcher"), "spec.mpiReplicaSpecs.Launcher: missing"),
        (lambda s: s["runPolicy"].update(backoffLimit="3"), "spec.runPolicy.backoffLimit: no int"),
    ],
)
def test_a_wrong_manifest_does_not(spec, change, fault):
    change(spec)
    (found,) = faults(spec, SCHEMA)
    assert found.startswith(fault)


def test_pods_have_what_ranks_need(spec):
    replicas = spec["mpiReplicaSpecs"]
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {"name", "image", "command"} <= container.keys()
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    ranks = replicas["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert f"mpishard run -n {ranks} " in launcher["args"][0]


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_the_launcher_names_the_operators_workers(spec, tmp_path):
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    file = tmp_path / "hostfile"
    file.write_text("gpt-worker-0.gpt.default.svc slots=2\ngpt-worker-1.gpt.default.svc slots=2\n")
    command = (
        launcher["args"][0].replace("exec mpishard", "echo").replace("/etc/mpi/hostfile", str(file))
    )
    ended = subprocess.run(
        [*launcher["command"], command], capture_output=True, text=True, timeout=20, check=True
    )
    hosts = "gpt-worker-0.gpt.default.svc:2,gpt-worker-1.gpt.default.svc:2"
    assert f"-n 4 --hosts {hosts} /opt" in ended.stdout
