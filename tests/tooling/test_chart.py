"""The Helm chart: every value, option, variable and port in it is one that the program has.

What helm itself makes of it is judged where there is a helm.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft7Validator
from ruamel.yaml import YAML
from typer.core import TyperGroup

from mlxd_controller.cli.app import app
from mlxd_controller.cli.configuration.keys import KEYS
from mlxd_gateway.door import OPEN_PATHS
from mlxd_shared import config
from mlxd_shared.domain.units import parse_bytes, parse_duration
from mlxd_worker.process import options as worker_options
from tests.tooling.command_line import parse_command, port_of

CHART = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "chart"
TEMPLATES = sorted((CHART / "templates").iterdir())
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm")
RELEASE, NAMESPACE = "stories", "models"
TIMEOUT_S = 60
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all": {
        "nameOverride": "mlxd",
        "imagePullSecrets": [{"name": "registry"}],
        "controller": {"preload": ["chat"], "options": ["--waiting-max", "8"]},
        "workers": {"replicas": 3, "gpus": 1, "modelMemory": "70G", "options": ["--rows-max", "8"],
                    "nodeSelector": {"gpu": "h200"}, "tolerations": [{"operator": "Exists"}]},
        "gateway": {"replicas": 2, "service": {"type": "LoadBalancer", "port": 443}},
        "router": {"enabled": True, "models": ["chat", "notes"], "networks": ["10.0.0.0/8"]},
        "models": {"existingClaim": "weights"},
        "auth": {"existingSecret": "secret"},
        "tls": {"existingSecret": "certificates"},
        "metrics": {"enabled": True, "vllmAliases": True},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "bench"}}}]},
    },
    "open": {
        "gateway": {"enabled": False},
        "auth": {"enabled": False},
        "tls": {"existingSecret": "certificates"},
        "networkPolicy": {"enabled": False},
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "a key that is none": {"worker": {"replicas": 2}},
    "no workers": {"workers": {"replicas": 0}},
    "a size without a unit": {"workers": {"modelMemory": "70"}},
    "a size as Kubernetes writes it": {"workers": {"modelMemory": "70Gi"}},
    "two GPUs for one model": {"workers": {"gpus": 2}},
    "a router for nobody": {"router": {"enabled": True, "models": ["chat"], "networks": []}},
    "an address that is no network": {"router": {"networks": ["10.0.0.3"]}},
    "a short token": {"auth": {"token": "x" * (config.TOKEN_CHARS_MIN - 1)}},
}


def load(name: str) -> dict[str, Any]:
    """Return a YAML file of the chart."""
    content = YAML(typ="safe").load((CHART / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return values as helm merges them."""
    both = {k: merge(base[k], v) for k, v in over.items() if isinstance(v, dict) and k in base}
    return {**base, **over, **both}


def accepts(values: dict[str, Any]) -> bool:
    """Return whether the schema takes values, beside the chart's own."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    Draft7Validator.check_schema(schema)
    return bool(Draft7Validator(schema).is_valid(merge(load("values.yaml"), values)))


def paths_of(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """Return the paths of all values that templates can name, without those of free form."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in {"image", "resources"}:
            yield from paths_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def flags_of(command: str) -> set[str]:
    """Return all options of a command."""
    if command == "mlxd-worker":
        help_text = worker_options._parser().format_help()
        return set(re.findall(r"--[a-z][a-z-]+", help_text))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {flag for option in group.commands[command].params for flag in option.opts}


def test_the_chart_is_of_this_version() -> None:
    """The images that it names by default are those of the program beside it."""
    project = (CHART.parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{load("Chart.yaml")["appVersion"]}"' in project


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_schema_takes_what_is_served(variant: str) -> None:
    """The chart's own values, and others."""
    assert accepts(VARIANTS[variant])


@pytest.mark.parametrize("name", REFUSED)
def test_the_schema_refuses_what_is_not(name: str) -> None:
    """Before anything is started."""
    assert not accepts(REFUSED[name])


def test_templates_use_every_value_and_no_other() -> None:
    """A value that nobody reads would be a promise; one that is not listed has no schema."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    known = set(paths_of(load("values.yaml")))
    placed = {f"{room}.{key}" for room in ("controller", "workers", "gateway")
              for key in ("nodeSelector", "tolerations")}  # fmt: skip
    assert used - {"controller", "workers", "gateway"} == known - placed
    assert {"controller", "workers", "gateway"} <= used


@pytest.mark.parametrize(
    ("template", "commands"),
    [
        ("controller.yaml", ["serve"]),
        ("workers.yaml", ["mlxd-worker"]),
        ("gateway.yaml", ["gateway"]),
        ("_helpers.tpl", ["serve", "mlxd-worker"]),
    ],
)
def test_every_option_is_one(template: str, commands: list[str]) -> None:
    """Of the command that is started with it; what helpers name is an option of all theirs."""
    text = (CHART / "templates" / template).read_text(encoding="utf-8")
    named = set(re.findall(r"- (--[a-z][a-z-]+)", text))
    assert named
    for command in commands:
        assert named <= flags_of(command), command


def test_every_variable_is_one() -> None:
    """A variable that the program does not read would be dropped in silence."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    named = set(re.findall(r"MLXD_\w+", text))
    assert named - {"MLXD_CONFIG"} <= {key.variable for key in KEYS}


@dataclass(frozen=True, slots=True)
class Rendered:
    """What helm makes of a variant: the documents by kind and name."""

    documents: dict[tuple[str, str], dict[str, Any]]

    def pod(self, kind: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a pod's specification and its one container."""
        template = self.documents[kind, name]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        return template["spec"], container


def render(values: dict[str, Any], folder: Path, chart: Path = CHART) -> Rendered:
    """Have helm lint a chart with these values, and render it."""
    assert HELM is not None
    file = folder / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    lines = (
        ["lint", "--strict", str(chart)],
        ["template", RELEASE, str(chart), "--namespace", NAMESPACE],
    )
    for line in lines:
        done = subprocess.run([HELM, *line, "-f", str(file)], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    documents = [each for each in YAML(typ="safe").load_all(done.stdout) if each]
    named = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(named) == len(documents)
    return Rendered(named)


def check_probe(probe: dict[str, Any], container: dict[str, Any], address: str) -> None:
    """Assert that a probe asks at the port that the program serves, in a way that it answers."""
    port = int(port_of(address))
    assert port in {each["containerPort"] for each in container["ports"]}
    if "grpc" in probe:
        assert probe["grpc"] == {"port": port}
    elif "exec" in probe:
        health = parse_command(probe["exec"]["command"])
        assert (port_of(health["address"]), str(health["tls_ca"])) == (
            str(port),
            "/etc/mlxd/tls/ca.crt",
        )
    else:
        named = {each["name"]: each["containerPort"] for each in container["ports"]}
        (how,) = probe.keys() & {"httpGet", "tcpSocket"}
        assert named[probe[how]["port"]] == port
        assert probe[how].get("path", "/health") in OPEN_PATHS


def check_whole(rendered: Rendered) -> None:
    """Assert that what documents name is there: volumes, claims, secrets, ports, pods."""
    pods = {}
    for (kind, name), document in rendered.documents.items():
        if kind not in {"Deployment", "StatefulSet"}:
            continue
        spec, container = rendered.pod(kind, name)
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"] == labels
        pods[name] = (labels, {each["name"]: each["containerPort"] for each in container["ports"]})
        assert {each["name"] for each in container["volumeMounts"]} == {
            each["name"] for each in spec["volumes"]
        }
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
        assert container["securityContext"]["readOnlyRootFilesystem"]
        for word in container["args"]:
            if word.startswith("/etc/mlxd/"):
                assert any(word.startswith(m["mountPath"]) for m in container["volumeMounts"])
    for (kind, _), document in rendered.documents.items():
        if kind != "Service":
            continue
        selector = document["spec"]["selector"]
        (ports,) = [ports for labels, ports in pods.values() if labels == selector]
        assert {each["targetPort"] for each in document["spec"]["ports"]} <= ports.keys()


@needs_helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_rendered_is_what_the_program_serves(variant: str, tmp_path: Path) -> None:
    """Commands are taken by the real command lines; names, ports and probes agree."""
    rendered = render(VARIANTS[variant], tmp_path)
    values = merge(load("values.yaml"), VARIANTS[variant])
    check_whole(rendered)
    name = values["nameOverride"] or RELEASE
    guarded = bool(values["tls"]["existingSecret"]) and values["auth"]["enabled"]

    _, controller = rendered.pod("Deployment", f"{name}-controller")
    serve = parse_command(controller["args"])
    assert (serve["allow_remote"], serve["open_health"]) == (not guarded, guarded)
    assert serve["memory_limit"] == parse_bytes(values["workers"]["modelMemory"])
    assert parse_duration(values["controller"]["keepAlive"]) == serve["keep_alive"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        check_probe(controller[kind], controller, serve["address"])

    _, worker = rendered.pod("StatefulSet", f"{name}-workers")
    options = parse_command(worker["args"])
    assert options["open_health"] == guarded
    assert options["machine"] == "$(POD_NAME)"
    check_probe(worker["readinessProbe"], worker, options["listen"])
    host = f"{name}-workers.{NAMESPACE}.svc:{port_of(options['listen'])}"
    replicas = rendered.documents["StatefulSet", f"{name}-workers"]["spec"]["replicas"]
    assert list(serve["worker"]) == [
        f"w{number}={name}-workers-{number}.{host}" for number in range(replicas)
    ]
    assert rendered.documents["Service", f"{name}-workers"]["spec"]["clusterIP"] == "None"
    limits = worker["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == values["workers"]["gpus"]

    if values["gateway"]["enabled"]:
        _, gateway = rendered.pod("Deployment", f"{name}-gateway")
        asks = parse_command(gateway["args"])
        for kind in ("readinessProbe", "livenessProbe"):
            check_probe(gateway[kind], gateway, asks["listen"])
        service = f"{name}-controller.{NAMESPACE}.svc"
        assert f"{service}:{port_of(serve['address'])}" in gateway["args"]
        assert ("Service", f"{name}-controller") in rendered.documents
    if values["router"]["enabled"]:
        assert list(serve["router_model"]) == values["router"]["models"]
        ports = [each["containerPort"] for each in controller["ports"]]
        assert [int(port_of(serve["router"])) + n for n in (0, 1)] == ports[-2:]
    assert (("Secret", f"{name}-token") in rendered.documents) == (
        values["auth"]["enabled"] and not values["auth"].get("existingSecret")
    )


@needs_helm
def test_another_token_is_rendered_as_other_pods(tmp_path: Path) -> None:
    """Each reads it when it starts: Kubernetes starts those anew whose annotations have changed."""

    def checksums(token: str) -> set[str]:
        documents = render({"auth": {"token": token}}, tmp_path).documents.values()
        specs = [each.get("spec", {}) for each in documents]
        templates = [spec["template"] for spec in specs if "template" in spec]
        assert len(templates) == len(("controller", "workers", "gateway"))
        return {each["metadata"]["annotations"]["checksum/token"] for each in templates}

    first, second = "a" * config.TOKEN_CHARS_MIN, "b" * config.TOKEN_CHARS_MIN
    assert checksums(first) == {hashlib.sha256(first.encode()).hexdigest()}
    assert checksums(second) == {hashlib.sha256(second.encode()).hexdigest()}
    assert checksums("") == {hashlib.sha256(b"").hexdigest()}


@needs_helm
@pytest.mark.parametrize("tls", ["", "certificates"], ids=["plain", "TLS"])
def test_tls_is_rendered_for_all_or_for_none(tls: str, tmp_path: Path) -> None:
    """Listeners, who dials them, probes, and what the Service says that it speaks."""
    rendered = render({"tls": {"existingSecret": tls}}, tmp_path)
    pods = {
        name: rendered.pod(kind, f"{RELEASE}-{name}")
        for kind, name in (
            ("Deployment", "controller"), ("StatefulSet", "workers"), ("Deployment", "gateway")
        )
    }  # fmt: skip
    for name, (spec, container) in pods.items():
        named = [each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "tls"]
        assert named == ([tls] if tls else []), name
        certificates = [word for word in container["args"] if word.startswith("/etc/mlxd/tls/")]
        assert {"/etc/mlxd/tls/tls.crt", "/etc/mlxd/tls/tls.key"} <= {*certificates} or not tls
        assert bool(certificates) == bool(tls), name
    serve = parse_command(pods["controller"][1]["args"])
    asks = parse_command(pods["gateway"][1]["args"])
    dialled = [serve["worker_tls_ca"], asks["tls_ca"]]
    assert dialled == ([Path("/etc/mlxd/tls/ca.crt")] * 2 if tls else [None, None])
    for name in ("controller", "workers"):
        assert pods[name][1]["readinessProbe"].keys() & {"grpc", "exec"} == {
            "exec" if tls else "grpc"
        }
    probe = pods["gateway"][1]["readinessProbe"]["httpGet"]
    assert probe["scheme"] == ("HTTPS" if tls else "HTTP")
    ports = rendered.documents["Service", f"{RELEASE}-controller"]["spec"]["ports"]
    spoken = [each.get("appProtocol") for each in ports if each["name"] == "grpc"]
    assert spoken == [None if tls else "kubernetes.io/h2c"]


def write_chart_with_notes(folder: Path) -> Path:
    """Copy the chart, with its notes as a document: `helm template` leaves them out."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    files = {
        "_notes.tpl": '{{- define "notes" }}' + notes + "{{ end }}",
        "notes.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\n"
        'data: {text: {{ include "notes" . | quote }}}\n',
    }
    for name, text in files.items():
        (chart / "templates" / name).write_text(text, encoding="utf-8")
    return chart


@needs_helm
@pytest.mark.parametrize("tls", ["", "certificates"], ids=["plain", "TLS"])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("policies", [False, True])
def test_notes_are_rendered_for_what_is_there(
    tmp_path: Path, tls: str, *, token: bool, policies: bool
) -> None:
    """How to ask the gateway; and a warning where nothing keeps others from the workers."""
    values = {
        "tls": {"existingSecret": tls},
        "auth": {"enabled": token},
        "networkPolicy": {"enabled": policies},
    }
    rendered = render(values, tmp_path, write_chart_with_notes(tmp_path))
    text = rendered.documents["ConfigMap", "notes"]["data"]["text"]
    assert f"from the claim {RELEASE}-models" in text
    assert f"-n {NAMESPACE} port-forward service/{RELEASE}-gateway 8556:80" in text
    assert ("curl -k https://127" if tls else "curl http://127") in text
    assert ('-H "Authorization: Bearer $TOKEN"' in text) == token
    assert (f"get secret {RELEASE}-token" in text) == token
    assert ("WARNING" in text) == (not policies and not (tls and token))


@needs_helm
def test_notes_are_rendered_without_a_gateway(tmp_path: Path) -> None:
    """Nothing is said of what is not there."""
    chart = write_chart_with_notes(tmp_path)
    rendered = render({"gateway": {"enabled": False}}, tmp_path, chart)
    text = rendered.documents["ConfigMap", "notes"]["data"]["text"]
    assert text.strip() == f"mlxd serves 2 models at a time, from the claim {RELEASE}-models."
