"""What outsiders get: the distributions, and files that a repository's host and tools read."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.wire.version import __version__

ROOT = Path(__file__).resolve().parent.parent
METADATA = """
from setuptools import build_meta
print(open(build_meta.prepare_metadata_for_build_wheel(".") + "/METADATA").read())
"""
USE = """
import numpy as np
import horovod_fftcomp as hfc
print(hfc.__file__)
steps = list(hfc.simulate("none", np.ones((2, 2, 2048), np.float32)))
print(len(steps), float(steps[0].average.sum()))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Return what a command prints; raise AssertionError with its errors if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(source: Path, **environment: str) -> Message:
    """Return the metadata of a wheel that would be built from the tree in ``source``."""
    printed = run(sys.executable, "-c", METADATA, cwd=source, **environment)
    return email.message_from_string(printed[printed.index("Metadata-Version") :])


@pytest.fixture
def tree(tmp_path):
    """Return a folder with what the cluster's image has when the package is installed."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
    before = dockerfile.split("RUN touch README.md")[0]
    for *sources, target in map(str.split, re.findall(r"^COPY (.*)", before, re.M)):
        (tmp_path / "tree" / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (ROOT / source).is_file():
                shutil.copy(ROOT / source, tmp_path / "tree" / target)
    (tmp_path / "tree" / "README.md").touch()
    return tmp_path / "tree"


def test_metadata_needs_no_more_than_the_image_has_and_extras_are_lean(tree):
    found = metadata(tree, REPOSITORY_URL="")
    assert found["Version"] == __version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Project-URL"] is None
    requirements = [Requirement(text) for text in found.get_all("Requires-Dist")]
    needed = {
        extra: {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})}
        for extra in found.get_all("Provides-Extra")
    }
    assert needed["torch-distributed"] == {"torch"}
    assert needed["examples"] == {"matplotlib", "scikit-learn"}
    assert {r.name for r in requirements if not r.marker} == {
        "llvmlite", "numba", "numpy", "packaging", "rich"
    }  # fmt: skip


def test_links_of_the_package_page_lead_to_the_repository_if_it_is_known(tree):
    shutil.copy(ROOT / "README.md", tree)
    plain = metadata(tree, REPOSITORY_URL="").get_payload()
    assert plain.strip() == (ROOT / "README.md").read_text("utf-8").strip()
    found = metadata(tree, REPOSITORY_URL="https://example.org/fork")
    assert found["Project-URL"] == "Repository, https://example.org/fork"
    links = re.findall(r"(?<!`)\]\(([^)]+)\)", found.get_payload())
    assert len(links) == len(re.findall(r"(?<!`)\]\(([^)]+)\)", plain)) > 20
    assert all(link.startswith(("https://", "http://")) for link in links)
    assert (
        "](https://example.org/fork/blob/HEAD/docs/training.md#checkpoints)" in found.get_payload()
    )
    pictures = re.findall(r"!\[.*\]\((.+)\)", found.get_payload())
    assert pictures == ["https://example.org/fork/raw/HEAD/benchmarks/results/headline.png"]


@pytest.mark.slow
def test_what_make_dist_builds_works_by_itself(tmp_path):
    pytest.importorskip("twine")
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=left_out)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = run("make", "--old-file=install", "dist", cwd=tree, PATH=tools, REPOSITORY_URL="")
    assert printed.count("PASSED") == 2
    archive, wheel = sorted((tree / "dist").iterdir(), key=lambda path: path.suffix)
    assert archive.name == f"horovod_fftcomp-{__version__}.tar.gz"
    assert wheel.name == f"horovod_fftcomp-{__version__}-py3-none-any.whl"

    with tarfile.open(archive) as contents:
        folders = {name.split("/")[1] for name in contents.getnames() if name.count("/") > 1}
    assert folders == {"horovod_fftcomp", "horovod_fftcomp.egg-info"}
    package = tree / "horovod_fftcomp"
    needed = [p for p in package.rglob("*") if p.suffix in (".py", ".pyi", ".cuh", ".typed")]
    assert any(path.suffix == ".cuh" for path in needed)
    with zipfile.ZipFile(wheel) as contents:
        names = set(contents.namelist())
    assert {path.relative_to(tree).as_posix() for path in needed} <= names
    assert {name.split("/")[0] for name in names} == {
        "horovod_fftcomp",
        f"horovod_fftcomp-{__version__}.dist-info",
    }

    fresh = tmp_path / "fresh"
    venv.create(fresh)
    site = fresh / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # What it depends on; not this clone, whose own .pth is read in site folders only.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "-q", "--no-deps", "--no-index", "--ignore-installed", wheel)
    run(sys.executable, "-m", "pip", "--python", fresh / "bin" / "python", *install, cwd=tmp_path)
    alone = {"PYTHONPATH": "", "COLUMNS": "80"}
    where, result = run(fresh / "bin" / "python", "-c", USE, cwd=tmp_path, **alone).splitlines()
    assert where == str(site / "horovod_fftcomp" / "__init__.py")
    assert result == "2 2048.0"
    command = fresh / "bin" / "horovod-fftcomp"
    assert run(command, "--version", cwd=tmp_path, **alone).split()[-1] == __version__
    assert "topk" in run(command, "recipes", cwd=tmp_path, **alone)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def steps_of(workflow: Path) -> list[dict]:
    """Return the steps of all jobs of a workflow."""
    jobs = pytest.importorskip("yaml").safe_load(workflow.read_text("utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", [])]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(workflow):
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    extras = set(re.findall(r'^    "([\w-]+)": \[', read("setup.py"), re.M))
    commands = "\n".join(step.get("run", "") for step in steps_of(workflow))
    assert set(re.findall(r"^make \S+ ([\w-]+)", commands, re.M)) <= targets
    assert set(re.findall(r"\.\[([\w-]+)\]", commands)) <= extras
    named = re.findall(r"(?:\.ci|tests|scripts)/[\w./-]+", commands)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert commands or named


def test_extras_are_quoted_for_shells_that_expand_brackets():
    package = ROOT / "horovod_fftcomp"
    paths = [*ROOT.glob("*.md"), *ROOT.glob("d*/*.md"), *package.rglob("*.py"), *WORKFLOWS]
    extra = r"(.)((?:\.|horovod_fftcomp)\[(?:torch|tensorflow|gpu|mpi|plot|dev|docs)\S*)"
    found = [each for path in paths for each in re.findall(extra, path.read_text("utf-8"))]
    assert len(found) > 10
    assert [text for before, text in found if before != "'"] == []


def test_every_python_that_is_named_is_tested():
    [matrix] = re.findall(r"python: (\[.*\])", read(".github/workflows/tests.yml"))
    tested = set(re.findall(r"3\.\d+", matrix))
    project = tomllib.loads(read("pyproject.toml"))["project"]
    named = {text.split(" :: ")[-1] for text in project["classifiers"] if " 3." in text}
    [installed] = re.findall(r"^PYTHONS = (.*?\))", read("scripts/bootstrap.py"), re.M)
    assert tested == named == set(re.findall(r"3\.\d+", installed))
    used = re.findall(r"python-version: \"(.*)\"", "".join(map(Path.read_text, WORKFLOWS)))
    assert set(used) <= tested
    assert project["requires-python"] == f">={min(tested)}"


def test_commits_are_linted_by_the_version_of_make_lint():
    [pinned] = re.findall(r"^ruff==(.*)$", read("scripts/requirements.txt"), re.M)
    hooks = pytest.importorskip("yaml").safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [hook["rev"] for hook in hooks] == [f"v{pinned}"]
    assert f'"ruff=={pinned}"' in read("setup.py")


def test_the_newest_version_is_that_of_the_package():
    versions = re.findall(
        r"^## \[(.+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.M
    )
    assert len(versions) == len(re.findall(r"^## ", read("CHANGELOG.md"), re.M))
    assert versions[0] == __version__
    citation = pytest.importorskip("yaml").safe_load(read("CITATION.cff"))
    assert citation["version"] == __version__


def test_every_source_of_a_recipe_is_cited():
    """In docs/citing.md by recipe, and with all authors in CITATION.cff."""
    entries = read("docs/citing.md").split("\n- ")[1:]
    form = re.compile(r'(.+?): (\w+).*?, "(.+?)", .*?(\d{4})\.(?= |$)')
    cited = [form.match(" ".join(entry.split())) for entry in entries if "Positions" not in entry]
    papers = pytest.importorskip("yaml").safe_load(read("CITATION.cff"))["references"]
    listed = {(p["authors"][0]["family-names"], p["title"], str(p["year"])) for p in papers}
    assert {(found[2], found[3], found[4]) for found in cited} == listed
    sources = {(each, f[2], f[4]) for f in cited for each in re.findall(r"`(\w+)`", f[1])}
    for name, recipe in RECIPES.items():
        for source in recipe.source.split("; "):
            found = re.fullmatch(r"(\w+).*?(\d{4})", source.replace("Horvath", "Horváth"))
            if source not in ("as fft", "this package", "Horovod's own"):
                assert (name, found[1], found[2]) in sources
