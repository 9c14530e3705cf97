"""``horovod-fftcomp bench``: its numbers against other ways to them, its data, its refusals."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp import recipes, simulate
from horovod_fftcomp.cli import bench as bench_command
from horovod_fftcomp.cli import bench_report, main
from horovod_fftcomp.cli.arguments import numels, recipe_choices
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.recipes import get_codec, get_scheme
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.tools import gradient_files
from horovod_fftcomp.tools.bench import RecipeSession, added, measure, memcpy, n_ticks
from horovod_fftcomp.tools.bench.measurement import entropy_bits
from horovod_fftcomp.tools.gradient_files import History

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command and returns (what it printed, its JSON)."""
    monkeypatch.setattr(threads, "chosen_threads", None)
    path = tmp_path / "bench.json"

    def run(*arguments: object) -> tuple[str, dict]:
        fixed = ["bench", "--repeat", "1", "--json", path]
        main([str(argument) for argument in [*fixed, *arguments]])
        return capsys.readouterr().out, json.loads(path.read_text())

    return run


def refusal(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, arguments)])
    assert caught.value.code == 2
    return capsys.readouterr().err.split("error: ")[1]


RECIPES = "none,fp16,bf16,topk(density=0.05),fft(density=0.2,bits=6),dct(block=64)"


def test_bytes_errors_and_bits_are_those_of_the_codec(bench):
    _, result = bench("-n", "5000", "--seed", 3, "--compression", RECIPES)
    x = gradient_files.synthetic(5000, seed=3).steps[1].astype(np.float64)
    [tensor] = result["tensors"]
    assert [row["recipe"] for row in tensor["recipes"]] == [
        "none", "fp16", "bf16", "topk", "fft", "dct",
    ]  # fmt: skip
    for row in tensor["recipes"][2:]:
        codec = get_codec(row["recipe"], **row["options"])
        payload = codec.encode(x.astype(np.float32))
        decoded = codec.decode(payload).astype(np.float64)
        assert row["numel"] == 5000
        assert payload.nbytes <= row["sent_nbytes"] < payload.nbytes + 16  # the bucket aligns
        assert row["ratio"] == 20000 / row["sent_nbytes"]
        error = np.linalg.norm(decoded - x) / np.linalg.norm(x)
        assert row["relative_error"] == pytest.approx(error, rel=1e-4)
        kept = (decoded**2).sum() / (x**2).sum()
        assert row["kept_energy"] == pytest.approx(kept, rel=1e-4)
        plan = codec.plan((5000,))
        if row["recipe"] == "bf16":
            assert row["bits_per_position"] is None
            continue
        p = plan.k / plan.n_bins
        entropy = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p
        assert row["entropy_per_position"] == pytest.approx(entropy)
        assert row["bits_per_position"] == 8 * plan.positions.nbytes / plan.k
        assert 0.99 * entropy < row["bits_per_position"] < entropy + 1.5


def test_dense_recipes_have_their_errors_and_no_feedback(bench):
    printed, result = bench("-n", "3000", "--compression", "none,fp16")
    none, fp16 = result["tensors"][0]["recipes"]
    x = gradient_files.synthetic(3000).steps[1]
    assert (none["ratio"], none["relative_error"]) == (1, 0)
    error = np.linalg.norm(x.astype(np.float16).astype(np.float64) - x) / np.linalg.norm(x)
    assert (fp16["ratio"], fp16["relative_error"]) == (2, pytest.approx(error, rel=1e-3))
    assert none["feedback_s"] is none["feedback_relative_error"] is None
    assert "3,000 elements" in printed


@pytest.mark.parametrize("recipe", ["topk(density=0.1)", "fft", "dct(density=0.1)"])
def test_error_with_feedback_is_that_of_a_training(recipe, bench, tmp_path):
    steps = np.random.default_rng(0).standard_normal((4, 40, 50)).astype(np.float32)
    np.savez(tmp_path / "g.npz", **{f"{t}/w": grad for t, grad in enumerate(steps)})
    _, result = bench("--gradients", tmp_path / "g.npz", "--compression", recipe)
    [choice] = recipe_choices(recipe)
    wanted = lost = 0.0
    owed = np.zeros(2000)
    flat = steps.reshape(4, 1, 2000)
    for number, step in enumerate(simulate(choice.name, flat, **choice.options)):
        if number > 0:  # the first step only makes the residual
            wanted += ((flat[number, 0] + owed) ** 2).sum()
            lost += (step.residual[0].astype(np.float64) ** 2).sum()
        owed = step.residual[0].astype(np.float64)
    [row] = result["total"]["recipes"]
    assert row["feedback_relative_error"] == pytest.approx(math.sqrt(lost / wanted), rel=1e-4)
    assert row["relative_error"] < row["feedback_relative_error"]


def test_a_file_is_summed_over_its_tensors(bench, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "conv": rng.standard_normal((20, 10, 3, 3)),  # float64
        "fc": 7 * rng.standard_normal((30, 50)).astype(np.float16),
        "bias": rng.standard_normal(5000).astype(np.float32),
        "small": rng.standard_normal((10, 10)).astype(np.float32),
    }
    np.savez(tmp_path / "g.npz", **arrays)
    printed, result = bench(
        "--gradients", tmp_path / "g.npz", "--compression", "topk(density=0.1)", "--per-tensor"
    )
    assert "2 vectors and small ones left out" in printed
    assert [tensor["title"] for tensor in result["tensors"]] == ["conv", "fc"]
    assert printed.index("conv: 1 memcpy") < printed.index("fc: 1 memcpy")
    [total] = result["total"]["recipes"]
    parts = [tensor["recipes"][0] for tensor in result["tensors"]]
    for key in ("numel", "sent_nbytes", "encode_s", "feedback_s", "decode_s", "memcpy_s", "k"):
        assert total[key] == pytest.approx(sum(part[key] for part in parts))
    codec = get_codec("topk", density=0.1)
    wanted = [arrays[name].astype(np.float32) for name in ("conv", "fc")]
    lost = [grad - codec.decode(codec.encode(grad)) for grad in wanted]
    error = math.sqrt(sum((e**2).sum() for e in lost) / sum((g**2).sum() for g in wanted))
    assert total["relative_error"] == pytest.approx(error, rel=1e-5)


def test_a_flat_array_is_a_tensor_and_min_numel_moves_the_border(bench, tmp_path):
    path = tmp_path / "flat.npy"
    np.save(path, np.ones(2000, np.float32))
    _, result = bench("--gradients", path, "--compression", "topk")
    assert result["tensors"][0]["title"] == "flat"
    np.save(path, np.ones(20, np.float32))
    _, result = bench("--gradients", path, "--compression", "topk", "--min-numel", 20)
    assert result["total"]["recipes"][0]["numel"] == 20


def test_the_gradient_zero_has_no_error(bench, tmp_path):
    np.save(tmp_path / "zero.npy", np.zeros((50, 50), np.float32))
    _, result = bench("--gradients", tmp_path / "zero.npy", "--compression", RECIPES)
    for row in result["total"]["recipes"]:
        assert (row["relative_error"], row["kept_energy"]) == (0, 1)


def test_json_tells_command_machine_and_options(bench):
    arguments = (
        "-n",
        "2k",
        "--threads",
        3,
        "--compression",
        "topk(density=0.5,error_feedback=False)",
    )
    _, result = bench(*arguments)
    assert result["command"].startswith("horovod-fftcomp bench --repeat 1 --json ")
    assert "'topk(density=0.5,error_feedback=False)'" in result["command"]
    machine = result["machine"]
    assert machine["threads"] == 3
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert machine["versions"]["numpy"] == np.__version__
    [row] = result["tensors"][0]["recipes"]
    assert row["options"] == {"density": 0.5, "error_feedback": False}
    assert row["feedback_s"] is None
    assert row["encode_memcpys"] == row["encode_s"] / row["memcpy_s"]
    assert {what: len(taken) for what, taken in row["samples_s"].items()} == {
        "memcpy": 1, "encode": 1, "decode": 1,
    }  # fmt: skip


def test_a_missing_matplotlib_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal(capsys, "-n", "2000", "--plot", tmp_path / "plot.png")
    assert "pip install matplotlib" in error


def test_the_plot_is_a_picture(bench, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    bench("-n", "2000", "--compression", "none,topk,fft", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_prints_the_tensors_that_are_done(bench, capsys, monkeypatch, tmp_path):
    whole = bench_command.bench.measure
    path = tmp_path / "interrupted.json"

    def until(n_done: int) -> tuple[str, str]:
        done = iter(range(n_done))

        def measured(*arguments):
            if next(done, None) is None:
                raise KeyboardInterrupt
            return whole(*arguments)

        monkeypatch.setattr(bench_command.bench, "measure", measured)
        with pytest.raises(SystemExit) as caught:
            main(["bench", "--repeat", "1", "--compression", "fp16", "--json", str(path),
                  "-n", "1100,1200,1300"])  # fmt: skip
        assert caught.value.code == 130
        return capsys.readouterr()

    printed, errors = until(2)
    assert printed.count("1 memcpy") == 2
    assert "Interrupted: 2 of 3 tensors." in printed
    assert "interrupted" in errors
    assert len(json.loads(path.read_text())["tensors"]) == 2
    printed, errors = until(0)
    assert (printed, errors) == ("", "horovod-fftcomp: interrupted\n")


def test_the_table_fits_into_120_columns_however_long_the_options(bench, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "fft(density=0.125,bits=10,block=1024,error_feedback=False)"
    printed, _ = bench("-n", "2000", "--compression", long)
    assert max(map(len, printed.splitlines())) <= 120
    assert "…" not in printed


def test_every_column_and_option_is_explained(capsys):
    page = (ROOT / "docs" / "bench.md").read_text()
    scheme = recipe_choices("topk")[0]
    tensor, grad = Tensor("w", (2000,)), gradient_files.synthetic(2000).steps[0]
    session = RecipeSession(*scheme, tensor, grad)
    rows = measure(History("w", [grad]), [session], 1, lambda: None)
    columns = bench_report.table(bench_report.Result("w", rows, [])).heads[1:]
    titles = [head.replace("\nms (x)", "").replace("\n", " ") for head in columns]
    assert re.findall(r"^\| ([^|]+) \|", page, re.M)[1:] == titles
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options <= set(re.findall(r"--[a-z-]+", page))


# The session: what is timed is what an engine does.


@pytest.mark.parametrize("choice", recipe_choices(RECIPES), ids=lambda choice: choice.name)
def test_a_session_sums_both_ranks_and_carries_the_residual(choice):
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((3, 2, 4000)).astype(np.float32)
    grads[:, 1] = grads[0, 1]  # the other rank sends the same in each step, without feedback
    session = RecipeSession(
        choice.label, choice.name, choice.options, Tensor("w", (4000,)), grads[0, 1]
    )
    steps = simulate(choice.name, grads, **choice.options)
    for number, (pair, expected) in enumerate(zip(grads, steps, strict=True)):
        received = session.collect(session.encode(pair[0], feedback=True))
        if number == 0:
            np.testing.assert_array_equal(session.decode(received).sums[0], 2 * expected.average)
        before = session.residual()
        again = session.encode(pair[0], feedback=True)
        assert session.residual().tobytes() == before.tobytes()
        del again
        session.advance(pair[0])
        np.testing.assert_array_equal(session.residual(), expected.residual[0])


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_a_sharded_exchange_is_measured_on_one_rank(options):
    """It owns all shards, so both rounds' payloads count."""
    grads = np.random.default_rng(0).standard_normal((3, 1, 4000)).astype(np.float32)
    options = {**options, "exchange": "sharded"}
    session = RecipeSession("topk", "topk", options, Tensor("w", (4000,)), grads[0, 0])
    for grad, expected in zip(grads, simulate("topk", grads, **options), strict=True):
        session.advance(grad[0])
        np.testing.assert_array_equal(session.residual(), expected.residual[0])
        assert session.sent_nbytes == expected.sent_bytes[0]


def test_auto_is_measured_with_what_it_has_chosen():
    walk = np.cumsum(np.random.default_rng(0).standard_normal(21_000))
    smooth = (walk[1000:] - walk[:-1000]).astype(np.float32)
    session = RecipeSession("auto", "auto", {"ratio": 40}, Tensor("w", (20_000,)), smooth)
    left, first = smooth - session.alone(smooth), get_scheme("auto", ratio=40).codec((20_000,))
    lost = np.square(smooth - first.decode(first.encode(smooth))).sum()
    assert np.square(left).sum() < 0.5 * lost
    assert session.sent_nbytes <= 4 * 20_000 / 40


def test_every_measured_step_is_timed_often_enough():
    class Counting:
        label, has_feedback, sent_nbytes = "counting", True, 1
        encoded = advanced = ticks = 0

        def encode(self, grad, feedback):
            self.encoded += 1

        def collect(self, message):
            return message

        decode = collect

        def alone(self, grad):
            return grad

        def advance(self, grad):
            self.advanced += 1

        def residual(self):
            return np.zeros(4, np.float32)

        def tick(self):
            self.ticks += 1

    for n_steps, repeat, timed, rounds in (
        (1, 3, 3, 1), (1, 5, 6, 2), (2, 3, 3, 1), (3, 5, 6, 2), (6, 1, 5, 5),
    ):  # fmt: skip
        session = Counting()
        history = History("w", [np.ones(4, np.float32)] * n_steps)
        [row] = measure(history, [session], repeat, session.tick)
        assert session.encoded == 2 * (timed + rounds)
        assert {len(taken) for taken in row.samples_s.values()} == {timed}
        assert session.advanced == 1 + max(1, n_steps - 1)
        assert session.ticks == n_ticks(history, 1, repeat)
        assert row.energy == 4 * max(1, n_steps - 1)


def test_entropy_at_its_ends():
    assert entropy_bits(10, 0) == entropy_bits(10, 10) == 0
    assert entropy_bits(16, 8) == pytest.approx(16)
    assert entropy_bits(10**6, 10**4) == pytest.approx(math.log2(math.comb(10**6, 10**4)), rel=1e-3)


def test_sums_leave_out_what_one_of_them_lacks():
    rng = np.random.default_rng(0)
    history = History("w", [rng.standard_normal(2000).astype(np.float32)])
    tensor = Tensor("w", (2000,))
    rows = []
    for options in ({}, {"error_feedback": False}):
        session = RecipeSession("topk", "topk", options, tensor, history.steps[0])
        assert isinstance(get_scheme("topk", **options), Allgather)
        rows += measure(history, [session], 1, lambda: None)
    assert rows[0].feedback_s is not None
    assert added(rows).feedback_s is None
    assert added(rows).numel == 4000


# Arguments and files.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25000000", [25_000_000]),
        ("25M", [25_000_000]),
        ("1e6", [1_000_000]),
        ("2.3M, 10k,1G", [2_300_000, 10_000, 10**9]),
    ],
)
def test_sizes_may_be_written_short(text, expected):
    assert numels(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "", "1.5", "M", "nan", "inf", "1e99", "1M,", "25m"])
def test_other_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write 25000000, 25M or 25e6"):
        numels(text)


def test_recipes_are_written_with_their_options():
    choices = recipe_choices("fft, topk(density=0.01, bits=8),dct(error_feedback=False)")
    assert [tuple(choice) for choice in choices] == [
        ("fft", "fft", {}),
        ("topk(density=0.01, bits=8)", "topk", {"density": 0.01, "bits": 8}),
        ("dct(error_feedback=False)", "dct", {"error_feedback": False}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "unknown recipe 'fast'; choose one of none, fp16"),
        ("topk(colour=1)", "recipe 'topk' has no option colour; it has: density, bits"),
        ("topk(density=2)", "density must lie in"),
        ("topk(density='a')", "density must be a number, got 'a'"),
        ("topk(density=0.1,density=0.2)", "is not a compression"),
        ("topk(density=print())", "is not a compression"),
        ("topk(0.1)", "is not a compression"),
        ("topk(**x)", "is not a compression"),
        ("topk(density=0.1", "is not a compression"),
        ("topk.x", "is not a compression"),
        ("topk=1", "is not a compression"),
        ("1", "is not a compression"),
        ("", "is not a compression"),
        ("topk,,fft", "is not a compression"),
    ],
)
def test_other_recipes_are_refused(text, message, capsys):
    assert message in " ".join(refusal(capsys, "--compression", text).split())


def test_steps_are_read_in_order_of_their_numbers(tmp_path):
    keys = ["10/b/c", "9/b/c", "9/a", "10/a"]
    arrays = {key: np.full((2, 3), float(key[:2].strip("/")), np.float32) for key in keys}
    np.savez(tmp_path / "g.npz", **arrays)
    histories = gradient_files.read(tmp_path / "g.npz")
    assert {history.name for history in histories} == {"b/c", "a"}
    for history in histories:
        assert [float(step[0, 0]) for step in history.steps] == [9, 10]


def test_arrays_of_any_order_and_width_become_float32_in_c_order(tmp_path):
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.savez(tmp_path / "g.npz", w=array, scalar=np.float64(3))
    w, scalar = gradient_files.read(tmp_path / "g.npz")
    assert w.steps[0].dtype == np.float32
    assert w.steps[0].flags.c_contiguous
    assert w.steps[0].reshape(-1).tolist() == list(range(12))
    assert scalar.steps[0].shape == ()


BAD_FILES = {
    "integers": ({"w": np.arange(5)}, "array 'w' of .* has dtype int64"),
    "complex": ({"w": np.ones(5, complex)}, "array 'w' of .* has dtype complex128"),
    "objects": ({"w": np.array([{}])}, "is not a .npy or .npz file of numbers"),
    "nan": ({"w": np.ones(5), "v": np.array([1, np.nan, np.inf])}, "array 'v' .* 2 of 3 elements"),
    "large": ({"w": np.array([1e300])}, "array 'w' .* beyond float32"),
    "no elements": ({"w": np.ones((0, 3))}, r"array 'w' .* has shape \(0, 3\)"),
    "nothing": ({}, "holds no array"),
    "shapes": ({"0/w": np.ones(3), "1/w": np.ones(4)}, "'1/w' .* an earlier step .* other names"),
    "small": ({"w": np.ones((3, 4))}, "each of the 1 arrays has fewer than 1024 elements"),
    "vector": ({"w": np.ones((3, 4)), "b": np.ones(5000)}, "--min-numel"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_without_gradients_are_refused_by_name(case, tmp_path, capsys):
    arrays, message = BAD_FILES[case]
    np.savez(tmp_path / "g.npz", **arrays)
    error = " ".join(refusal(capsys, "--gradients", tmp_path / "g.npz").split())
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut short", b"\x93NUMPY\x01"])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_files_of_another_kind_are_refused(content, suffix, tmp_path, capsys):
    path = tmp_path / f"g{suffix}"
    path.write_bytes(content)
    assert "numpy.savez(path, **{" in refusal(capsys, "--gradients", path)


def test_steps_that_compress_are_measured_of_a_recipe_with_dense_ones(bench):
    """The seventh step is the one that is timed."""
    text = "topk(warmup_steps=100, dense_every=7, ranks_per_node=2)"
    _, result = bench("-n", "5000", "--compression", f"topk,{text}")
    plain, dense = result["tensors"][0]["recipes"]
    assert plain["sent_nbytes"] == dense["sent_nbytes"] < 2000
    assert dense["label"] == text


def test_every_recipe_is_measured(tmp_path):
    path = tmp_path / "all.json"
    main(["bench", "--all", "-n", "5000", "--repeat", "1", "--json", str(path)])
    [found] = json.loads(path.read_text())["tensors"]
    assert [row["recipe"] for row in found["recipes"]] == list(recipes.RECIPES)


def test_contradictory_arguments_are_refused(tmp_path, capsys, monkeypatch):
    assert "No such file" in refusal(capsys, "--gradients", tmp_path / "absent.npy")
    assert "not allowed with" in refusal(capsys, "--gradients", tmp_path, "-n", "5")
    assert "--per-tensor is for a file" in refusal(capsys, "--per-tensor")
    assert "--all measures every recipe" in refusal(capsys, "--all", "--compression", "fft")
    assert "create the folder" in refusal(capsys, "--json", tmp_path / "no" / "x.json")
    assert "must end in .png" in refusal(capsys, "--plot", tmp_path / "plot.xyz")
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert "needs matplotlib" in refusal(capsys, "--plot", tmp_path / "plot.png")
    assert "at least 0, got -1" in refusal(capsys, "--seed", "-1")
    assert "at least 1, got x" in refusal(capsys, "--threads", "x")


def test_a_full_memory_is_told(capsys, monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(gradient_files, "synthetic", fails)
    assert "the memory is full; take smaller tensors" in refusal(capsys, "-n", "100G")


def test_made_up_gradients_are_heavy_tailed_and_a_function_of_the_seed():
    first, again = (gradient_files.synthetic(100_000, seed=5).steps for _ in range(2))
    other = gradient_files.synthetic(100_000, seed=6).steps
    for one, same, different in zip(first, again, other, strict=True):
        assert one.dtype == np.float32
        assert np.isfinite(one).all()
        assert one.tobytes() == same.tobytes()
        assert one.tobytes() != different.tobytes()
        kurtosis = (one.astype(float) ** 4).mean() / (one.astype(float) ** 2).mean() ** 2
        assert kurtosis > 6  # a normal distribution has 3, a Laplace distribution 6
    assert abs(np.corrcoef(*first)[0, 1]) < 0.05
    for n in (1, 1023, 1025):
        assert gradient_files.synthetic(n).steps[0].shape == (n,)


def testmemcpy_copies_with_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "chosen_threads", 3)
    source = np.arange(1_000_003, dtype=np.float32)
    target = np.zeros_like(source)
    memcpy(target, source)
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("option", ["decay=0.9", "beta=0.5", "decay=0.9,beta=0.5"])
def test_a_recipe_with_a_changed_residual_is_measured_without_feedback_too(option):
    [choice] = recipe_choices(f"topk:density=0.1,{option}")
    tensor = Tensor("w", (64, 64))
    other = np.ones(64 * 64, np.float32)
    session = RecipeSession(*choice, tensor, other)
    assert session.has_feedback
