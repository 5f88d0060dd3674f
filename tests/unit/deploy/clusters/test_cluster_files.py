"""The files that make clusters: Ray's own check of its cluster file, the KubeRay manifest, and the script for Slurm."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.sections.runtime_config import FleetConfig
from asyncrl.deploy.commands.join import DRAIN

DEPLOY = Path(__file__).parents[4] / "deploy"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def loaded(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; scripts/test ray installs it")
@pytest.mark.filterwarnings("ignore")
def test_ray_accepts_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    (config,) = loaded("ray.yaml")
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == len(config["provider"]["worker_ips"])


def test_every_node_of_the_cluster_file_asks_for_the_token() -> None:
    (config,) = loaded("ray.yaml")
    starts = [config[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert all(start.startswith("RAY_AUTH_MODE=token ") for start in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_the_manifest_is_a_cluster_with_one_image_a_token_and_shared_memory() -> None:
    """KubeRay 1.6's own schema of a RayCluster accepted it, checked by hand; here what runs need of it."""
    cluster, claim = loaded("kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    containers = [container for pod in pods for container in pod["containers"]]
    assert {container["image"] for container in containers} == {"asyncrl:ray"}
    for pod, container in zip(pods, containers, strict=True):
        assert pod["securityContext"]["runAsNonRoot"]
        assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    claims = [each["persistentVolumeClaim"] for each in pods[0]["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [{"claimName": claim["metadata"]["name"]}]
    workers = spec["workerGroupSpecs"][0]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


SAVING = 30.0
"""Seconds that whoever kills a run has to leave beside its grace, at least: for the checkpoint and the workers' end."""


def test_slurm_waits_for_the_grace_and_a_checkpoint_before_it_kills() -> None:
    script = (DEPLOY / "slurm.sbatch").read_text()
    (signalled,), (grace,) = (re.findall(rf"{flag}(\d+)", script) for flag in ("--signal=B:TERM@", "--fleet.grace "))
    assert int(signalled) >= int(grace) + SAVING


@pytest.mark.parametrize("service", ["controller", "controller-gpu", "training", "training-gpu"])
def test_docker_waits_for_the_grace_and_a_checkpoint_before_it_kills(service: str) -> None:
    (compose,) = loaded("../docker-compose.yml")
    waits = float(compose["services"][service]["stop_grace_period"].removesuffix("s"))
    assert waits >= FleetConfig().grace + SAVING


def test_kubernetes_waits_for_the_grace_and_a_checkpoint_before_it_kills() -> None:
    spec = loaded("kuberay.yaml")[0]["spec"]
    head, workers = (each["template"]["spec"] for each in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]))
    assert head["terminationGracePeriodSeconds"] >= FleetConfig().grace + SAVING
    assert workers["terminationGracePeriodSeconds"] >= DRAIN + SAVING


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed; scripts/test ray installs it")
def test_the_scripts_are_sound_shell() -> None:
    scripts = [DEPLOY / "slurm.sbatch", DEPLOY.parent / "scripts" / "set-up-ray"]
    done = subprocess.run([SHELLCHECK, *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
