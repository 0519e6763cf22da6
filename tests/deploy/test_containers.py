"""The image itself: containers of a server, of `observe` and of engines that share one directory and nothing else; a
server that is killed, drained and followed by one of another image."""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.toml import read_toml
from tests.deploy.manifests import containers, documents, toml
from tests.deploy.podman import BASE, PYTHON, REQUIRED, Podman, missing, skip, wait_for_server
from tests.support.certificates import make_certificate
from tests.support.processes import ran
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/kvframework"
# Of the image with all its packages, as podman says it.
MOST_BYTES = 180_000_000
SERVER, ENGINES = 10001, (20002, 20003)
AS_CLIENT = f"--env=KVFRAMEWORK_SERVER_UID={SERVER}"
PROGRAM = Path(__file__).with_name("engine_program.py")
# The arena and what the server needs, far above /dev/shm.
TOML = f"""
[server]
endpoint = "ipc:///run/kvframework/server.sock"
admit_uids = {list(ENGINES)}

[l1]
use = "pinned"
capacity = "128MiB"
high_watermark = 0.9
low_watermark = 0.8

[[l2]]
use = "filesystem"
path = "/cache"
write_policy = "write_back"
"""
pytestmark = [pytest.mark.skipif(bool(missing()) and not REQUIRED, reason=missing()), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    with Podman() as running:
        if running.refused:
            skip(running.refused)
        wheels = tmp_path_factory.mktemp("wheels")
        download_requirements(wheels)
        with index(wheels) as (url, certificates):
            given = {"BASE": BASE, "PIP_INDEX_URL": url, "CA": certificates}
            arguments = [f"--build-arg={name}={value}" for name, value in given.items()]
            running.build(IMAGE, ROOT / "deploy" / "Dockerfile", ROOT, "--network=host", *arguments)
        yield running


@contextmanager
def index(wheels: Path) -> Iterator[tuple[str, str]]:
    """A package index of the wheels, and the certificates without which nobody can use it."""
    for wheel in list(wheels.iterdir()):
        project = wheels / wheel.name.partition("-")[0].lower().replace("_", "-")
        project.mkdir(exist_ok=True)
        wheel.rename(project / wheel.name)
    made = make_certificate(wheels.parent)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=wheels)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://localhost:{server.server_address[1]}", made.certificate.read_text()
        server.shutdown()


@pytest.fixture(scope="module")
def next_image(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another release."""
    folder = tmp_path_factory.mktemp("next")
    (folder / "Dockerfile").write_text(
        f"FROM {IMAGE}\nUSER 0\nRUN sed -i 's/^__version__ = .*/__version__ = \"0.3.9\"/'"
        " /opt/kvframework/lib/python*/site-packages/kvframework/__init__.py\nUSER 10001:10001\n"
    )
    podman.build("localhost/next", folder / "Dockerfile", folder, "--network=none")
    return "localhost/next"


def download_requirements(folder: Path) -> None:
    """Wheels of all that the image installs, for the Python in it; what pip cannot do here is a reason to skip."""
    packages = re.findall(r"/src/(plugins/[\w/]+)", (ROOT / "deploy" / "Dockerfile").read_text())
    tables: list[Any] = [read_toml(ROOT / each / "pyproject.toml") for each in (".", *packages)]
    required = [each["build-system"]["requires"] + each["project"]["dependencies"] for each in tables]
    wanted = [each for some in required for each in some if not each.startswith("kvframework")]
    wanted += [*tables[0]["project"]["optional-dependencies"]["zstd"], "opentelemetry-exporter-otlp-proto-http>=1.36"]
    wanted.append("async-timeout")  # redis needs it for Debian's 3.11.2
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--constraint", str(ROOT / "constraints.txt"), *wanted]
    done = ran(*command, code=None, timeout=600)
    if done.returncode:
        skip(f"pip downloads nothing here: {done.stderr[-500:]}")


@pytest.fixture(scope="module")
def directory(podman: Podman) -> Path:
    """Made as on a node: by kubelet, for root, and given to the server by the init container of the DaemonSet."""
    place = podman.folder / "socket"
    place.mkdir(mode=0o755)
    daemonset, _ = documents("daemonset", "DaemonSet")
    made = containers(daemonset)["directory"]
    security = made["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    entrypoint, *flags = made["command"]

    def given(folder: Path) -> None:
        options = ("--rm", "--cap-add=CHOWN", f"--volume={folder}:/run/kvframework", f"--entrypoint={entrypoint}")
        podman.run(*options, IMAGE, *flags, *made["args"], user=security["runAsUser"])

    for _ in range(2):  # and once more, after a restart of the pod
        given(place)
    foreign = podman.folder / "foreign"
    foreign.mkdir()
    os.chown(foreign, 30003, 30003)
    with pytest.raises(AssertionError, match="/run/kvframework belongs to uid 30003, expected: 0 or 10001"):
        given(foreign)
    assert foreign.stat().st_uid == 30003
    status = place.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (SERVER, 0o711)
    return place


@pytest.fixture(scope="module")
def server(podman: Podman, directory: Path) -> str:
    file = podman.folder / "kvf.toml"
    file.write_text(TOML)
    cache = podman.folder / "cache"
    cache.mkdir()
    os.chown(cache, SERVER, SERVER)
    start_server(podman, "server", IMAGE)
    return "server"


def start_server(podman: Podman, name: str, image: str, *options: str, arguments: Sequence[str] = ()) -> None:
    places = {"socket": "/run/kvframework", "cache": "/cache", "kvf.toml": "/etc/kvframework/kvf.toml:ro"}
    mounts = [f"--volume={podman.folder}/{at}:{to}" for at, to in places.items()]
    podman.run("--detach", f"--name={name}", "--memory=640m", *mounts, *options, image, *arguments)
    wait_for_server(podman, name)


def engine(podman: Podman, directory: Path, task: str, user: int) -> None:
    """Store, or load and compare each byte."""
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))) or find_spec("torch") is None:
        skip(f"the engines' torch is that of this environment, and the image has Python {PYTHON}")
    import torch

    mounts = {directory: "/run/kvframework", Path(torch.__file__).resolve().parents[1]: "/torch", PROGRAM: "/engine.py"}
    volumes = [f"--volume={at}:{to}:ro" for at, to in mounts.items()]
    command = ["--rm", AS_CLIENT, "--entrypoint=/opt/kvframework/bin/python", *volumes, IMAGE, "/engine.py", task]
    assert f"{task} as uid {user}: 1024 tokens" in podman.run(*command, user=user)


def test_the_server_has_no_privilege(podman: Podman, server: str) -> None:
    status = podman("exec", server, "cat", "/proc/1/status")
    shown = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert shown["Uid"].split() == [str(SERVER)] * 4
    assert {shown[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert shown["NoNewPrivs"] == "1"
    podman("exec", server, "sh", "-c", "! touch /tmp/any && ! touch /opt/kvframework/any")


def test_observe_runs_beside_it_with_the_same_rights(podman: Podman, server: str, directory: Path) -> None:
    podman.run("--detach", "--name", "observe", "-v", f"{directory}:/run/kvframework:ro", IMAGE, "observe")
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9309/metrics', timeout=60).read().decode())"

    def up() -> bool:
        return "\nkvframework_up 1" in podman("exec", "observe", "python3", "-c", ask, check=False)

    wait_until(up, 300.0, "metrics of the server")


def test_the_sidecar_serves_from_a_volume_that_any_user_may_write_to(podman: Podman) -> None:
    """As its manifest says, with less L1; an emptyDir is root's, with mode 0777."""
    (engine,) = documents("sidecar", "Deployment")
    sidecar = containers(engine)["kvframework"]
    volume = podman.folder / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    file = toml("sidecar", podman.folder)
    mounts = [f"--volume={volume}:/run/kvframework", f"--volume={file}:/etc/kvframework/kvf.toml:ro"]
    given = [f"--env={each['name']}={each['value']}" for each in sidecar["env"]]
    podman.run("--detach", "--name", "sidecar", *mounts, *given, IMAGE, *sidecar["args"], "--set", "l1.capacity=64MiB")
    wait_for_server(podman, "sidecar")
    for probe in ("startupProbe", "livenessProbe"):
        url = f"http://127.0.0.1:9309{sidecar[probe]['httpGet']['path']}"
        ask = f"import urllib.request as r; print(r.urlopen('{url}', timeout=60).status)"
        wait_until(lambda ask=ask: podman("exec", "sidecar", "python3", "-c", ask, check=False).strip() == "200", 300.0)


def test_the_probe_of_the_image_is_that_of_its_server(podman: Podman, server: str) -> None:
    (image,) = json.loads(podman("image", "inspect", IMAGE))
    shell, *probe = image["Healthcheck"]["Test"]
    assert shell == "CMD"
    podman("exec", server, *probe)
    podman.run("--rm", IMAGE, "try", "--help")  # of `helm test`
    assert image["Config"]["User"] == "10001:10001"
    assert image["Size"] <= MOST_BYTES, image["Size"]


def test_an_update_after_a_kill_and_a_drain_loses_nothing(
    podman: Podman, server: str, directory: Path, next_image: str
) -> None:
    """L1 outlives `kill -9` of the server; the server of the next image has what the drain wrote, and ends in order."""
    engine(podman, directory, "store", ENGINES[0])

    def pid() -> int:
        shown = podman("exec", server, "kvframework", "status", "--json", check=False)
        return int(json.loads(shown)["server"]["pid"]) if shown.startswith("{") else 0

    killed = pid()
    podman("exec", server, "sh", "-c", f"kill -9 {killed}")
    wait_until(lambda: pid() not in (0, killed), 300.0, "the next server of the keeper")
    engine(podman, directory, "load", ENGINES[1])
    # The end of the container may end the command before it reports.
    podman("exec", server, "kvframework", "drain", "--timeout", "60s", check=False)
    assert podman("wait", server).strip() == "0"
    start_server(podman, "next", next_image)
    assert "0.3.9" in podman("exec", "next", "kvframework", "--version")
    engine(podman, directory, "load", ENGINES[1])
    podman("stop", "--time", "120", "next")
    assert podman("wait", "next").strip() == "0", podman("logs", "next")


def test_an_update_of_the_daemonset_keeps_l1_and_so_does_the_way_back(
    podman: Podman, server: str, directory: Path, next_image: str
) -> None:
    """Each container has the arguments, the environment and the probe of the manifest's server."""
    made = containers(documents("daemonset", "DaemonSet")[0])["server"]
    shell, option, probe = made["readinessProbe"]["exec"]["command"]
    given = ["--mount=type=tmpfs,destination=/run/keeper,tmpfs-mode=1777"]
    given += [f"--env={each['name']}={each['value']}" for each in made["env"]]

    def ready(name: str) -> bool:
        return podman("exec", name, shell, option, f"{probe} && echo yes", check=False).strip() == "yes"

    for before, name, image in ("", "pod", IMAGE), ("pod", "updated", next_image), ("updated", "back", IMAGE):
        start_server(podman, name, image, *given, arguments=made["args"])
        wait_until(lambda name=name: ready(name), 300.0, f"{name} is ready")  # type: ignore[misc]
        if before:
            assert not ready(before)
            podman("stop", "--time", "60", before)
        engine(podman, directory, "load" if before else "store", ENGINES[0])
        began = json.loads(podman("exec", name, "kvframework", "status", "--json"))["l1"]["recovered"]
        assert bool(began["objects"]) == bool(before), began
