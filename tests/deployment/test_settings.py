"""Settings in the manifests are ones that the services have."""

from __future__ import annotations

import re

import pytest

from tests.deployment.rendered import (
    IN_THE_CLEAR,
    OVERLAYS,
    ROOT,
    SETTINGS,
    component,
    compose,
    configured,
    container,
    of_kind,
    read,
)

DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_gets_the_time_that_draining_takes(overlay: str) -> None:
    for name, template, settings in configured(overlay):
        hook = container(template).get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        needed = settings.drain_grace_s + hook.get("seconds", 0)
        assert template["spec"]["terminationGracePeriodSeconds"] > needed, name
        if "torch.distributed.run" in container(template).get("command", []):
            (flag,) = (a for a in container(template)["args"] if "shutdown-timeout" in a)
            assert int(flag.partition("=")[2]) > settings.drain_grace_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_demo_speaks_in_the_clear(overlay: str) -> None:
    for name, template, settings in configured(overlay):
        assert settings.host == "0.0.0.0"
        assert settings.allow_insecure is (overlay in IN_THE_CLEAR), name
        mounts = [m["mountPath"] for m in container(template)["volumeMounts"]]
        for path in (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs):
            assert bool(path) is (overlay not in IN_THE_CLEAR), name
            assert not path or path.rpartition("/")[0] in mounts, f"{name}: {path} is mounted"


def test_the_demo_asks_for_models_that_its_images_hold() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for _, template, settings in configured("cpu-demo-swap"):
        if (service := component(template)) != "orchestrator":
            model = settings.model
            assert re.search(rf"^COPY demo{model} {model}$", dockerfile, re.MULTILINE)
            assert container(template)["image"].startswith(f"flyspec-{service}-demo:")


def declared_reopen_timeout_s() -> float:
    default = SETTINGS["orchestrator"].model_fields["reopen_timeout_s"].default
    assert isinstance(default, float)
    return default


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_streams_wait_for_as_long_as_a_target_may_load(overlay: str) -> None:
    found = list(configured(overlay))
    probes = [container(t)["startupProbe"] for _, t, _ in found
              if component(t) == "verify" and "startupProbe" in container(t)]  # fmt: skip
    (loading_s,) = (p["failureThreshold"] * p["periodSeconds"] for p in probes)
    (orchestrator,) = (settings for name, _, settings in found if name == "orchestrator")
    assert orchestrator.reopen_timeout_s == loading_s


def test_documents_have_the_time_for_which_streams_wait() -> None:
    default = declared_reopen_timeout_s()
    told = (ROOT / "docs" / "reliability.md").read_text()
    assert f"| `--reopen-timeout-s` | {default:.0f} |" in told
    told = " ".join((ROOT / "docs" / "deployment.md").read_text().split())
    assert f"streams wait for up to {default / 60:.0f} minutes (`--reopen-timeout-s`" in told
    assert f"{default / 60:.0f} minutes while a target restarts" in told
    assert f"`proxy_read_timeout {default:.0f}s`" in told


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_ranks_are_as_many_as_gpus(overlay: str) -> None:
    gpus, sizes = 0, set()
    for _, template, settings in configured(overlay):
        if component(template) == "verify":
            gpus += int(container(template)["resources"]["limits"]["nvidia.com/gpu"])
            sizes.add(settings.tensor_parallel_size)
            medium = {v["name"]: v.get("emptyDir", {}).get("medium")
                      for v in template["spec"]["volumes"]}  # fmt: skip
            mounts = {m["mountPath"]: m["name"] for m in container(template)["volumeMounts"]}
            assert medium[mounts["/dev/shm"]] == "Memory"
    for workload in of_kind(overlay, "LeaderWorkerSet"):
        assert workload["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert sizes == {gpus}


@pytest.mark.parametrize("files", [("docker-compose.yml",),
                                   ("docker-compose.yml", "docker-compose.tls.yml")])  # fmt: skip
def test_compose_says_what_the_services_understand(files: tuple[str, ...]) -> None:
    seen = set()
    for name, service in compose(*files).items():
        known = name.partition("-")[0]
        if known not in SETTINGS:
            continue
        seen.add(known)
        variables = {k: DEFAULT.sub(r"\1", v) for k, v in service["environment"].items()}
        settings = read(known, variables)
        assert seconds(service["stop_grace_period"]) > settings.drain_grace_s
        assert settings.allow_insecure is (len(files) == 1), name
        if known == "orchestrator":
            assert settings.reopen_timeout_s == declared_reopen_timeout_s()
    assert seen == set(SETTINGS)
