"""The files in docker/, and where asked for, the cluster of network namespaces that they make."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
SCRIPTS = ("entrypoint", "launch", "netns", "run")
DOCKERFILES = ("Dockerfile", "Dockerfile.gpu")
TOOLS = ("ip", "tc", "unshare", "setpriv", "nsenter", "ssh-keygen", "horovodrun")

needs_cluster = pytest.mark.skipif(
    "FFTCOMP_TEST_CLUSTER" not in os.environ
    or os.geteuid() != 0
    or not Path("/usr/sbin/sshd").exists()
    or not all(map(shutil.which, TOOLS)),
    reason="needs root, iproute2, openssh-server, and FFTCOMP_TEST_CLUSTER set",
)


def services():
    return yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]


def test_four_nodes_share_one_image_that_is_built_once():
    assert list(services()) == ["node1", "node2", "node3", "node4"]
    assert [name for name, node in services().items() if "build" in node] == ["node1"]
    assert len({node["image"] for node in services().values()}) == 1
    for name, node in services().items():
        assert node["hostname"] == name  # horovodrun takes another name for another host
        assert node["cap_add"] == ["NET_ADMIN"]
        assert "privileged" not in node
        assert node["healthcheck"]["test"]
        assert "RATE" in node["environment"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_are_plain(name):
    text = (DOCKER / name).read_text()
    assert "<<" not in text
    assert not re.search(r"^#\s*syntax\s*=", text, re.M)
    assert "privileged" not in text
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+\nFROM \$\{BASE_IMAGE\}$", text, re.M)
    assert "useradd" in text
    for source in re.findall(r"^COPY (.+) \S+$", text, re.M):
        for path in source.split():
            assert list(ROOT.glob(path)), f"{name} copies {path}, which is not there"


def test_packages_of_the_gpu_image_have_versions():
    text = (DOCKER / "Dockerfile.gpu").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install --no-cache-dir ([^&\n]*)", text)
    packages = [
        word.strip('"')
        for line in installs
        for word in line.split()
        if not word.startswith(("-", "http", "."))
    ]
    assert packages
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", package) for package in packages)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_sound(name):
    path = DOCKER / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", path], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_make_lists_both_clusters():
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert re.search(r"make cluster .*Docker", listed)
    assert re.search(r"make cluster-netns .*root", listed)


@pytest.mark.parametrize("arguments", [[], ["-n", "4"], ["-n", "0", "true"], ["-n", "x", "true"]])
def test_bad_arguments_are_told(arguments):
    done = subprocess.run([DOCKER / "netns", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "docker/netns" in done.stderr


@pytest.fixture
def cluster(tmp_path):
    """Return a function that starts the cluster; everything it prints goes to its stdout."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TMPDIR": str(tmp_path),
    }
    runs = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        run = subprocess.Popen(
            [DOCKER / "netns", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        runs.append(run)
        return run

    yield start
    for run in runs:  # a test that failed may have left it
        if run.poll() is None:
            run.terminate()
            run.wait(30)
        run.stdout.close()


def training(steps: int, script: str = "cluster_training.py") -> list[str]:
    return [sys.executable, str(ROOT / "tests" / script), str(steps)]


def kill_node(run: subprocess.Popen[str], number: int) -> None:
    """Kill a node of ``run`` as a machine that loses its power."""
    end = f"--node\0{number}\0".encode()
    lines = {pid: Path("/proc", str(pid), "cmdline").read_bytes() for pid in below(run.pid)}
    [node] = [pid for pid, line in lines.items() if line.endswith(end) and b"unshare" in line]
    os.kill(node, signal.SIGKILL)


def below(pid: int) -> list[int]:
    """Return all processes below ``pid``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found += [int(path.parent.name), *below(int(path.parent.name))]
    return found


def wait_for(run: subprocess.Popen[str], text: str) -> str:
    """Read what ``run`` prints up to ``text``."""
    read = ""
    for line in run.stdout:
        read += line
        if text in line:
            return read
    pytest.fail(f"{text!r} was not printed in:\n{read}")


def gone(pids: list[int]) -> bool:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        if not any(Path("/proc", str(pid)).exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@pytest.mark.slow
@pytest.mark.parallel
@needs_cluster
@pytest.mark.parametrize("flags", [[], ["--gloo"]], ids=["mpi", "gloo"])
def test_two_hosts_train_alike(flags, cluster, tmp_path):
    before = links()
    run = cluster("-n", "2", "-r", "200mbit", *flags, *training(5))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "hosts node1 node2; 1 kinds of parameters" in output
    assert links() == before
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.slow
@pytest.mark.parallel
@needs_cluster
@pytest.mark.parametrize("flags", [[], ["--gloo"]], ids=["mpi", "gloo"])
def test_a_host_that_is_killed_ends_the_run(flags, cluster):
    run = cluster("-n", "3", *flags, *training(1_000_000))
    read = wait_for(run, "step 5")
    everything = below(run.pid)
    kill_node(run, 3)
    begin = time.monotonic()
    output, _ = run.communicate(timeout=90)
    assert run.returncode not in (0, None)
    assert gone(everything)
    print(f"ended after {time.monotonic() - begin:.1f} s:\n{(read + output)[-3000:]}")
    assert re.search("node3|rank 2|HorovodInternalError", output), output


@pytest.mark.slow
@pytest.mark.parallel
@needs_cluster
def test_an_elastic_run_loses_a_host_and_goes_on(cluster):
    run = cluster("-n", "3", "--gloo", "--min-np", "2", *training(150, "cluster_elastic.py"))
    read = wait_for(run, "step 20")
    kill_node(run, 3)
    output, _ = run.communicate(timeout=240)  # Gloo gives a lost rank up after 30 s
    assert run.returncode == 0, read + output
    for host in ("node1", "node2"):
        assert f"{host}: 2 ranks, residuals unchanged" in output
    assert re.search(r"residuals of former ranks \[\d\] are lost with their hosts", output)
    assert re.search(r"hosts node[12] node[12]; 1 kinds of parameters", output)


@pytest.mark.slow
@pytest.mark.parallel
@needs_cluster
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_interrupted_cluster_leaves_nothing(end, cluster, tmp_path):
    before = links()
    run = cluster("-n", "2", "--gloo", *training(1_000_000))
    wait_for(run, "step 5")
    everything = below(run.pid)
    run.send_signal(signal.Signals[end])
    run.communicate(timeout=30)
    assert run.returncode not in (0, None)
    assert gone(everything)
    assert links() == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
