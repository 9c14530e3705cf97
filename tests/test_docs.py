"""The documents say what the code does."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import horovod_fftcomp
from horovod_fftcomp import RECIPES, get_codec, get_scheme, schedules
from horovod_fftcomp.adapter.compressor import FIGURES
from horovod_fftcomp.cli import main as command_line
from horovod_fftcomp.cli.recipes import near_square
from horovod_fftcomp.codec import base
from horovod_fftcomp.engine import buckets
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.wire.coded_levels import CodedLevels, frequencies
from horovod_fftcomp.wire.counter_rng import random_words
from tests.loops import each
from tests.make_recipe import (
    FILES,
    MEMORY,
    NUMEL,
    RECIPES_PAGE,
    TABLE,
    modules_of,
    rows_of,
    with_fresh_table,
)
from tests.test_layering import FLOOR_OF

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docker/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
# What needs a framework, a launcher or a device; the rest has to be importable anywhere.
APART = ("torch", "torch_distributed", "torch_tensors", "tensorflow", "mpi", "cuda", "integrations")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "horovod_fftcomp").rglob("*.py")
    if not {*path.relative_to(ROOT).parts, path.stem} & set(APART)
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.S | re.M)


def section(page: str, title: str) -> str:
    """Return what stands between the heading ``title`` and the next one of its kind."""
    return read(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_recipes_is_fresh():
    text = RECIPES_PAGE.read_text("utf-8")
    assert len(TABLE.findall(text)) == 1
    assert text == with_fresh_table(text), "run: make recipe"


def test_the_command_and_the_readme_have_the_same_ratios(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    command_line(["recipes"])
    printed = capsys.readouterr().out
    told = dict(re.findall(r"^(\w+) +([\d.]+) +[\d.]+ +[\d.]+  ", printed, re.M))
    page = RECIPES_PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) \| [^|]+ \|$", page, re.M)
    assert told == dict(rows)
    assert set(told) == set(RECIPES)
    assert float(told["powersgd"]) > 100
    assert "a tensor of 1,000 x 1,000" in printed
    assert near_square(NUMEL) == (1000, 1000)
    assert near_square(50_000) == (200, 250)
    assert near_square(7) == (7,)


def grows_with_the_ranks(name: str) -> bool:
    """Tell whether many ranks gather what each hands in, and not only parts of one whole."""
    tensor, large = Tensor("w", (200, 200)), Tensor("w", (4000, 4000))
    if "alltoall" in make_policy(name).decided((large,), 64).at(0).rounds:
        return False
    parts = advice.compressed(parse_recipe(name), [tensor], {}, 1).parts
    return "allgather" in {message.collective for part in parts for message in part.messages}


def test_recipes_that_always_gather_are_named():
    text = " ".join(read("README.md").split())
    [sentence] = re.findall(r"many ranks, and the recipe is (.*?)\.\*\*", text)
    expected = {name for name in RECIPES if grows_with_the_ranks(name)}
    assert set(re.findall(r"`(\w+)`", sentence)) == expected


def test_a_recipe_has_one_round_or_two():
    assert "A recipe has one or two rounds" in " ".join(read("docs/horovod.md").split())
    assert {len(get_scheme(name).rounds) for name in RECIPES} == {1, 2}


def test_the_folders_that_import_a_framework_are_named():
    [rule] = re.findall(r"Only (.*?) import a framework", read("CONTRIBUTING.md"), re.S)
    named = set(re.findall(r"`(horovod_fftcomp/[\w/]+)`", rule))
    with_framework = {
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / "horovod_fftcomp").rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Import)
        if {alias.name.split(".")[0] for alias in node.names} & {"torch", "tensorflow", "horovod"}
    }
    assert with_framework - {"horovod_fftcomp/kernels/cuda"} == named  # the GPU's arrays
    for folder in named:
        assert folder.replace("/", ".") in horovod_fftcomp.__doc__


def test_the_architectures_figure_has_the_floors_of_the_layering():
    [figure] = code_blocks("docs/architecture.md", "text")
    lines = figure.splitlines()
    at = {
        name: next(n for n, line in enumerate(lines) if re.search(rf"\b{name}\b", line))
        for name in FLOOR_OF
        if not name.startswith("__")
    }
    top_down = sorted(at, key=at.__getitem__)
    assert [FLOOR_OF[name] for name in top_down] == sorted(map(FLOOR_OF.get, at), reverse=True)
    assert len({(at[name], FLOOR_OF[name]) for name in at}) == len({FLOOR_OF[name] for name in at})


def test_the_functions_of_a_gradients_trip_are_in_their_files():
    row = r"\| \[[^]]+\]\(\.\./([^)]+\.py)\) \| (`[^|]*`) \|"
    rows = re.findall(row, read("docs/architecture.md"))
    assert len(rows) >= 18
    missing = {
        f"{path}: {name}"
        for path, names in rows
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"^ *(?:def|class) {name}\b", read(path), re.M)
    }
    assert not missing


def test_every_codec_is_named_where_they_have_their_common_part():
    folder = ROOT / "horovod_fftcomp" / "codec"
    codecs = {p.stem for p in folder.glob("*.py") if "Codec):" in p.read_text("utf-8")}
    assert codecs - {"base"} == set(re.findall(r"``(\w+)``", base.__doc__))


def test_the_commands_of_a_clone_stand_in_the_readme():
    commands = "\n".join(code_blocks("README.md", "sh"))
    targets = re.findall(r"^(demo[a-z-]*):.*\n\t.* (examples/\w+\.py) ", read("Makefile"), re.M)
    assert [target for target, _ in targets] == ["demo", "demo-tf", "demo-ddp"]
    for target, script in targets:
        assert re.search(rf"^make {target} ", commands, re.M)
        assert f"`{script}`" in read("docs/installing.md")
    assert re.search(r"^make test\b", commands, re.M)


@pytest.mark.more
@pytest.mark.parametrize("block", code_blocks("README.md", "python"))
def test_the_readmes_scripts_run_as_they_stand(block, tmp_path):
    script = tmp_path / "train.py"
    launcher, made = "torch.distributed.run --standalone --nproc-per-node 2", "compression"
    if "horovod.torch" in block:
        launcher, made = f"tests.launch -np 2 --gloo {sys.executable}", "optimizer._compression"
    text = f"f'compressed {{{made}.stats()[\"steps\"]}} steps'"
    script.write_text(f"{block}\nimport os; os.write(1, ({text} + chr(10)).encode())\n", "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *launcher.split(), script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("compressed 10 steps") == 2


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 160


def test_the_headline_is_measured():
    """The speed-ups over ``none`` of AlexNet on four hosts, in results/cluster.json."""
    points = json.loads(read("benchmarks/results/cluster.json"))["points"]

    def gain(mbit: int, way: str) -> float:
        [ways] = [
            point["ways"]
            for point in points
            if (point["model"], point["batch"], point["hosts"]) == ("alexnet", 16, 4)
            if point["mbit_per_s"] == mbit
        ]
        return ways["none"]["step_s"] / ways[way]["step_s"]

    text = " ".join(read("README.md").split())
    slow = {way: f"{gain(100, way):.1f}" for way in ("fft", "topk", "fp16")}
    assert f"{slow['fft']} times as fast with `fft` and {slow['topk']} times with `topk`" in text
    assert f"16-bit gradients give {slow['fp16']} times" in text
    fast = sorted(round(100 * (gain(1000, way) - 1)) for way in ("fft", "topk"))
    assert f"gains {fast[0]} to {fast[1]} %" in text


@pytest.mark.more
def test_the_site_builds_without_a_warning(tmp_path):
    """Links, anchors and the names in docs/api.md among what MkDocs looks at."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
    built = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "REPOSITORY_URL": "https://example.org/fork",
        },
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.html")}
    assert {"index.html", "api.html", "methods.html", "performance.html"} <= set(pages)
    assert (
        f"<title>Recipes - horovod_fftcomp {horovod_fftcomp.__version__}</title>"
        in pages["recipes.html"]
    )
    assert all('href="https://example.org/fork"' in page for page in pages.values())
    assert 'class="md-footer__link md-footer__link--next"' in pages["recipes.html"]
    assert '<td data-column="what is sent">' in pages["recipes.html"]
    assert "<td><code>topk</code></td>" in pages["recipes.html"]
    api = pages["api.html"]
    order = ["torch_distributed.compress", "torch.compression.Compression", "simulate"]
    at = [api.index(f'id="horovod_fftcomp.{name}"') for name in order]
    assert at == sorted(at)
    topk = api.split('id="horovod_fftcomp.adapter.signatures.Compression.topk"')[1].split("<h3")[0]
    assert "Bits per sent value: 2 to 16, or 32 for float32." in topk
    assert "timeout_s" not in topk


def test_the_page_names_the_files_of_each_recipe():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    told = {
        name: set(re.findall(r"horovod_fftcomp/((?:schemes|codec)/\S+?)\)", row))
        for name, row in rows_of(text, FILES).items()
    }
    wrong = {name for name in told if told[name] != {*modules_of(RECIPES[name].make())}}
    assert not wrong, f"delete their names from docs/architecture.md, {FILES}; run: make recipe"
    assert told.keys() == RECIPES.keys(), "run: make recipe"


def test_every_recipe_has_its_section():
    sections = set(re.findall(r"^## (\S+)$", read("docs/methods.md"), re.M))
    assert set(RECIPES) <= sections, "write its section in docs/methods.md, as those of others"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_examples_in_pages(page):
    failed, _ = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_python_in_pages_compiles(page):
    for number, block in enumerate(code_blocks(page, "python")):
        if ">>>" not in block:
            compile(block, f"{page}, Python block {number}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_pages_exist(page):
    text = read(page)
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", text)
    named = [path for path in named if Path(path).suffix or (ROOT / path.split("/")[0]).is_dir()]
    missing = [path for path in named if not (ROOT / path).exists()]
    folder = (ROOT / page).parent
    linked = re.findall(r"\]\((?!\w+:)([^)#]+)", text)
    missing += [path for path in linked if not (folder / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_pages_exist(page, capsys):
    with pytest.raises(SystemExit):
        command_line(["--help"])
    help_text = capsys.readouterr().out
    text = read(page)
    for command in re.findall(r"horovod-fftcomp ([a-z][\w-]*)", text):
        assert re.search(rf"^ +{command}\b", help_text, re.M), command
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    named = re.findall(r"`make ([a-z -]+)`", text)
    for block in code_blocks(page, "sh"):
        named += re.findall(r"^make ((?:[a-z-]+ ?)+)", block, re.M)
    assert set(" ".join(named).split()) <= targets


def test_every_recipe_has_its_memory_stated():
    assert rows_of(read("docs/methods.md"), MEMORY).keys() == RECIPES.keys(), "run: make recipe"


def test_every_key_of_stats_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", section("docs/horovod.md", "Stats"), re.M))
    assert explained == set(FIGURES)


def methods_of_a_compressor() -> list[ast.FunctionDef]:
    """Return the methods for users; parsed, since importing them needs Horovod."""
    tree = ast.parse(read("horovod_fftcomp/adapter/compressor.py"))
    return [
        method
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and owner.name == "Compressor"
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    ]


def test_every_method_of_a_compressor_is_named():
    text = read("docs/horovod.md") + read("docs/training.md")
    names = {m.name: f"{m.name}(" for m in methods_of_a_compressor()}
    properties = [m for m in methods_of_a_compressor() if m.decorator_list]
    names |= {m.name: f"compression.{m.name}`" for m in properties}
    assert not [name for name, named in names.items() if named not in text]


def test_every_setting_is_in_the_table_with_its_default():
    tree = ast.parse(read("horovod_fftcomp/adapter/settings.py"))
    defaults = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            text = ast.unparse(node.value)
            defaults[node.target.id] = str(vars(buckets).get(text, text)).replace("'", '"')
    assert defaults
    table = section("docs/horovod.md", "Settings")
    assert dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.M)) == defaults


def test_every_schedule_has_its_formula():
    table = section("docs/training.md", "Density over time")
    given = {"density": 0.2, "start": 0.5, "end": 0.05, "steps": 100, "tau": 10}
    formulas = dict(re.findall(r"^\| `(\w+)\(.*?\)` \| (.+?) \|", table, re.M))
    assert set(formulas) == {kind.__name__ for kind in schedules.Schedule.__args__}
    del formulas["Steps"]
    for name, formula in formulas.items():
        kind = getattr(schedules, name)
        options = {field: given[field] for field in kind.__dataclass_fields__}
        names = vars(math) | options | {"min": min}
        for step in (0, 1, 30, 100, 5000):
            expected = eval(formula.strip("`"), {"__builtins__": {}}, names | {"t": step})
            assert kind(**options).at(step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md", "benchmarks/README.md"])
def test_accuracies_are_those_of_the_benchmark(page):
    result = json.loads(read("benchmarks/results/digits_accuracy.json"))
    text = " ".join(read(page).split())
    for name, recipe in result["recipes"].items():
        expected = [f"{100 * np.mean(recipe['accuracy']):.2f} %"] if name == "none" else []
        if name != "none":
            found = recipe["difference_points"]
            expected += [f"{found['mean']:.2f}", f"{found['low']:.2f} to {found['high']:+.2f}"]
            expected += [f"{recipe['ratio']:.1f}"]
        assert not [number for number in expected if number not in text], name


def test_the_table_of_hooks_is_that_of_the_benchmark():
    page = " ".join(read("benchmarks/README.md").split())
    results = json.loads(read("benchmarks/results/ddp_torture.json"))
    for trial in results["trials"].values():
        cells = [
            re.split(":| from| in ", trial["hooks"][hook]["result"])[0] for hook in results["hooks"]
        ]
        assert f"| {trial['title']} | {' | '.join(cells)} |" in page
        ours = {trial["hooks"][hook]["result"] for hook in ("powersgd", "topk", "fft")}
        assert ours == {"0"}, trial["title"]


def test_the_tables_of_benchmarks_are_fresh(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("tables")
    pages = {path: path.read_text("utf-8") for path in tables.PAGES}
    marks = re.findall(r"<!-- (\w+) -->", "".join(pages.values()))
    assert set(marks) == {*tables.TABLES, "ddp_torture"}
    stale = [path.name for path, page in pages.items() if tables.filled(page) != page]
    assert not stale, "run: python benchmarks/tables.py"


@pytest.mark.more
@pytest.mark.torch
def test_every_picture_is_drawn_from_the_committed_results(tmp_path, monkeypatch):
    for needed in ("matplotlib", "horovod.torch"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    importlib.import_module("plots").main(tmp_path)
    committed = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.png")}
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {name for name in committed if not name.startswith("language_model_")}


def test_every_benchmark_is_explained():
    scripts = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
    headings = re.findall(r"^## (.*)$", read("benchmarks/README.md"), re.M)
    assert scripts == sorted(", ".join(headings).split(", "))


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]),
    ids=lambda path: path.stem,
)
def test_what_a_script_takes_from_the_package_is_there(path):
    """Most scripts take too long to be run by tests, or need a machine of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("horovod_fftcomp"):
            continue
        if {*node.module.split(".")} & {*APART} - {"torch_tensors"}:
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                importlib.import_module(f"{node.module}.{name}")


def test_the_line_budget_counts_code_alone():
    spec = importlib.util.spec_from_file_location("size", ROOT / "scripts" / "size.py")
    size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(size)
    source = '"""Doc."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n'
    source += '    """Doc.\n\n    More.\n    """\n    # why\n    return x  # here\n'
    tree = ast.parse(source)
    lines = size.code_lines(source, tree)
    assert lines == {4, 5, 8, 14}
    spans = dict(size.functions(tree))
    assert {name: len(lines.intersection(span)) for name, span in spans.items()} == {"f": 2}


# A decoder of payloads, written from docs/wire-format.md alone.


def decode_by_the_book(
    payload: bytes, *, density: float, bits: int, transform: str, block: int = 256
) -> np.ndarray:
    """Return the float32 array that a payload stands for; ``transform``: "none", "fft" or "dct"."""
    shape, header_nbytes, layout, k, scale, grid, finite = _read_header(payload)
    numel = math.prod(shape)
    if not finite:
        return np.full(shape, np.nan, np.float32)
    blocks = math.ceil(numel / block)
    n = {"none": numel, "fft": blocks * block // 2, "dct": blocks * block}[transform]
    reals = 2 if transform == "fft" else 1
    expected_k = 0 if n == 0 else min(n, max(1, math.floor(density * n + 1e-9)))
    w, positions_nbytes, expected_layout = _cheapest(n, expected_k)
    values_at = header_nbytes + math.ceil(positions_nbytes / 8) * 8
    end = values_at + math.ceil(expected_k * reals * bits / 8)
    if end - header_nbytes >= 4 * numel:
        assert (layout, k, len(payload)) == (0, numel, header_nbytes + 4 * numel)
        return np.frombuffer(payload, "<f4", numel, header_nbytes).reshape(shape)
    assert (layout, k, len(payload)) == (expected_layout, expected_k, end)
    positions = _positions(payload[header_nbytes:values_at], layout, n, k, w)
    values = _values(payload[values_at:], k * reals, bits, scale, grid)
    coeffs = np.zeros((n, reals))
    coeffs[positions] = values.reshape(k, reals)
    elements = _inverse(coeffs, transform, block)[:numel]
    return elements.astype(np.float32).reshape(shape)


def _read_header(payload: bytes) -> tuple[tuple[int, ...], int, int, int, float, int, bool]:
    magic, version, dtype, flags, ndim, layout = struct.unpack_from("<3s5B", payload, 0)
    assert (magic, version, dtype) == (b"HFC", 4, 2)
    _, k, payload_nbytes = struct.unpack_from("<3Q", payload, 8)
    scale, grid, checksum = struct.unpack_from("<fII", payload, 32)
    shape, at = [], 44
    for _ in range(ndim):
        dimension = shift = 0
        more = True
        while more:
            dimension |= (payload[at] & 0x7F) << shift
            more, shift, at = payload[at] >= 0x80, shift + 7, at + 1
        shape.append(dimension)
    header_nbytes = math.ceil(at / 16) * 16
    header = payload[:40] + bytes(4) + payload[44:header_nbytes]
    assert zlib.crc32(header) == checksum
    assert payload_nbytes == len(payload)
    return tuple(shape), header_nbytes, layout, k, scale, grid, not flags & 1


def _cheapest(n: int, k: int) -> tuple[int, int, int]:
    """Return (w, bytes of the positions, layout)."""
    if k in (0, n):
        return 0, 0, 1
    best = (math.ceil(n / 8), 2, 0)
    for w in range(1, 17):
        cost = math.ceil((k + math.ceil(n / 2**w)) / 8) + math.ceil(k * w / 8)
        best = min(best, (cost, 3, w))
    return best[2], best[0], best[1]


def _bits_of(data: bytes) -> list[int]:
    return [byte >> bit & 1 for byte in data for bit in range(8)]


def _codes_of(data: bytes, count: int, width: int) -> list[int]:
    stream = np.array(_bits_of(data), np.int64)[: count * width].reshape(count, width)
    return (stream << np.arange(width)).sum(1).tolist()


def _positions(data: bytes, layout: int, n: int, k: int, w: int) -> list[int]:
    if layout == 1:
        return list(range(n))
    if layout == 2:
        return [i for i, bit in enumerate(_bits_of(data)) if bit]
    unary_nbytes = math.ceil((k + math.ceil(n / 2**w)) / 8)
    ones = [u for u, bit in enumerate(_bits_of(data[:unary_nbytes])) if bit]
    offsets = _codes_of(data[unary_nbytes:], k, w)
    return [
        ((u - i) << w) | offset for i, (u, offset) in enumerate(zip(ones, offsets, strict=True))
    ]


def _values(data: bytes, count: int, bits: int, scale: float, grid: int) -> np.ndarray:
    if bits == 32:
        values = np.frombuffer(data, "<f4", count)
        assert np.abs(values).max(initial=0) <= scale
        return values
    codes = _codes_of(data, count, bits)
    z, d = grid >> 31, (grid & 0x7FFFFFFF) or 1
    pattern = struct.unpack("<I", struct.pack("<f", scale))[0]
    p = base = 0
    if pattern >= 0x00800000:
        top = pattern
        if z and d == 2 ** min(23, 27 - bits):
            top = min((pattern + d // 2) // d, 0x7F7FFFFF // d) * d
        p = min(2 ** (bits - 1) - z, (top - 0x00800000) // d + 1)
        base = top - (p - 1) * d
    else:
        z = 1

    def value(code: int) -> float:
        assert code < 2 * p + z
        if code < z:
            return 0.0
        is_negative = code >= p + z
        step = code - z - p * is_negative
        magnitude = struct.unpack("<f", struct.pack("<I", base + step * d))[0]
        return -magnitude if is_negative else magnitude

    return np.array([value(code) for code in codes], np.float32)


def _inverse(coeffs: np.ndarray, transform: str, block: int) -> np.ndarray:
    if transform == "none":
        return coeffs[:, 0]
    i, j = np.arange(block)[:, None], np.arange(1, block)
    if transform == "dct":
        c = coeffs[:, 0].reshape(-1, block)
        cosines = np.cos(np.pi * (i + 0.5) * j / block)
        return (c[:, :1] + np.sqrt(2) * c[:, 1:] @ cosines.T).ravel()
    z = (coeffs[:, 0] + 1j * coeffs[:, 1]).reshape(-1, block // 2)
    waves = np.exp(2j * np.pi * i * j[: block // 2 - 1] / block)
    ends = z[:, :1].real + (-1.0) ** i.T * z[:, :1].imag
    return (ends + 2 * (z[:, 1:] @ waves.T).real).ravel()


SHAPES = [(), (0,), (1,), (7, 3), (16,), (300, 2), (5, 7, 11, 3), (4096,), (9001, 4)]
DENSITIES = [0.002, 0.05, 0.15, 0.25, 0.45, 0.9, 1.0]


@each("shape", SHAPES)
@each("bits", [3, 5, 8, 16, 32])
@each("density", DENSITIES)
def test_a_decoder_written_from_the_page_reads_topk(density, bits, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(1e-3)
    codec = get_codec("topk", density=density, bits=bits)
    payload = codec.encode(x)
    ours = decode_by_the_book(payload.tobytes(), density=density, bits=bits, transform="none")
    assert ours.shape == x.shape
    assert ours.tobytes() == codec.decode(payload).tobytes()


@each("shape", SHAPES)
@each("block", [64, 256])
@each("density, bits", [(0.05, 10), (0.4, 6), (1.0, 4)])
@each("recipe", ["fft", "dct"])
def test_a_decoder_written_from_the_page_reads_transforms(recipe, density, bits, block, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    options = {"density": density, "bits": bits, "block": block}
    codec = get_codec(recipe, **options)
    payload = codec.encode(x)
    ours = decode_by_the_book(payload.tobytes(), transform=recipe, **options)
    np.testing.assert_allclose(ours, codec.decode(payload), atol=1e-5)


def test_these_shapes_and_densities_meet_every_layout():
    codecs = [get_codec("topk", density=density, bits=8) for density in DENSITIES]
    met = {codec.encode(np.ones(shape, np.float32))[7] for codec in codecs for shape in SHAPES}
    assert met == set(range(4))


def test_bfloat16_values_are_the_upper_halves_of_float32():
    payload = get_codec("bf16").encode(np.array([1, -2.5, 3.14159] * 50, np.float32))
    halves = np.frombuffer(payload.tobytes()[48:], "<u2").astype("<u4")
    values = (halves << 16).view("<f4")
    assert values[:3].tolist() == [1, -2.5, 3.140625]
    assert values.tobytes() == get_codec("bf16").decode(payload).tobytes()


@each("n", [1000, 8192, 8193, 30_001])
@each("ratio, bucket", [(16, 256), (30, 128), (100, 1024)])
@each("values", ["normal", "heavy", "rows of zeros"])
def test_a_decoder_written_from_the_page_reads_dithered_levels(values, ratio, bucket, n):
    rng = np.random.default_rng(n)
    x = (rng.standard_t(2, n) if values == "heavy" else rng.standard_normal(n)).astype(np.float32)
    if values == "rows of zeros":
        x[: 3 * n // 4] = 0
    codec = get_codec("dither", ratio=ratio, bucket=bucket)
    payload = codec.encode(x, step=3, name="w", rank=1).tobytes()
    shape, at, *_ = _read_header(payload)
    ours = _dithered_levels(payload[at:], math.prod(shape), CodedLevels(ratio, bucket))
    assert ours.tobytes() == codec.decode(np.frombuffer(payload, np.uint8)).tobytes()


def _dithered_levels(body: bytes, n: int, form: CodedLevels) -> np.ndarray:
    offset, key = struct.unpack_from("<2I", body)
    found, at = np.zeros(n, np.float32), 8
    random = random_words(key, n).reshape(-1)
    for chunk, begin in enumerate(range(0, n, 8192)):
        m = min(8192, n - begin)
        n_symbols, n_buckets, room = math.ceil(m / 2), math.ceil(m / form.bucket), form.room(m)
        unit, n_words, table = struct.unpack_from("<fHH", body, at)
        codes, end = body[at + 8 : at + 8 + n_buckets], at + 8 + 4 * math.ceil(n_buckets / 4)
        states = list(struct.unpack_from("<4Q", body, end))
        words = iter(struct.unpack_from(f"<{n_words}I", body, end + 32))
        is_zero, at = body[at : at + 8] == bytes(8), end + 32 + 4 * room
        if is_zero:
            continue
        steps = [_step(np.float32(unit), code) for code in codes]
        for i in range(n_symbols):
            d = ((int(random[4096 * chunk + i]) + offset) % 2**32 >> 12) - 2**19
            sign, a = (-1, -d - 1) if d < 0 else (1, d)
            owners = _slots(form, table, a // 2**16)
            slot = states[i % 4] % 4096
            symbol, f, start = owners[slot]
            state = f * (states[i % 4] // 4096) + slot - start
            states[i % 4] = state * 2**32 + next(words) if state < 2**31 else state
            v = np.float32((a + 0.5) / 2**20)
            for place, level in ((i, symbol % 15 - 7), (n_symbols + i, symbol // 15 - 7)):
                if place < m:
                    value = np.float32(sign) * (np.float32(level) - v)
                    found[begin + place] += steps[place // form.bucket] * value
        assert next(words, None) is None
        assert states == [2**31] * 4
    assert at == len(body)
    return found


def _step(unit: np.float32, code: int) -> np.float32:
    part = unit * np.float32(2 ** (-(code % 8) / 8))
    bits = int(part.view(np.uint32)) - (code // 8 << 23)
    return np.float32(0) if code == 255 or bits < 1 << 23 else np.uint32(bits).view(np.float32)


@functools.cache
def _slots(form: CodedLevels, table: int, part: int) -> list[tuple[int, int, int]]:
    """Return for each slot its symbol, the symbol's frequency and its first slot."""
    slots: list[tuple[int, int, int]] = []
    for symbol, f in enumerate(frequencies(form, table, part)):
        slots += [(symbol, f, len(slots))] * f
    assert len(slots) == 4096
    return slots


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_decoder_written_from_the_page_knows_what_is_not_finite(bad):
    payload = get_codec("topk", density=0.01, bits=32).encode(
        np.array([[1.0, bad]] * 600, np.float32)
    )
    ours = decode_by_the_book(payload.tobytes(), density=0.01, bits=32, transform="none")
    assert ours.shape == (600, 2)
    assert np.isnan(ours).all()
