"""``horovod-fftcomp run``: what it hands to Horovod, refuses, reports and passes on."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.cli import main, run
from horovod_fftcomp.cli.run_report import print_comparison
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.recipe_text import parse_recipe, parse_recipes
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.run import import_hook
from horovod_fftcomp.tools.run import launcher as jobs
from horovod_fftcomp.tools.run.import_hook import WRAPPERS, Wrapping
from horovod_fftcomp.tools.run.step_report import StepReport
from tests.test_parallel import run_ranks

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = f"{sys.executable} -m tests.launch --gloo"


def refusal(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["run", *map(str, arguments)])
    assert caught.value.code == 2
    return capsys.readouterr().err.split("error: ")[1]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint(f'ran as {__name__} {sys.argv[1:]}')\nsys.exit(7)\n")
    return path


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch, no_launcher):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(import_hook, "installed", [])
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)
    for name, (_, wrappers) in WRAPPERS.items():  # other tests of this process use them
        for wrapper in wrappers:
            if (plain := getattr(sys.modules.get(name), wrapper, None)) is not None:
                monkeypatch.setattr(sys.modules[name], wrapper, plain)
                if isinstance(plain, type):  # DDP, whose constructor is replaced
                    monkeypatch.setattr(plain, "__init__", plain.__init__)


# Recipes, as they are written on the command line.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fft", [("fft", {})]),
        ("fft:density=0.15", [("fft", {"density": 0.15})]),
        ("fft:density=0.15,bits=8,auto", [("fft", {"density": 0.15, "bits": 8}), ("auto", {})]),
        ("none,topk:scope=model", [("none", {}), ("topk", {"scope": "model"})]),
        ("none, fft(bits=6) ,auto", [("none", {}), ("fft", {"bits": 6}), ("auto", {})]),
    ],
)
def test_recipes_are_read(text, expected):
    found = parse_recipes(text)
    assert [(choice.name, dict(choice.options)) for choice in found] == expected
    for choice in found:
        assert parse_recipe(choice.text) == choice
        assert not set(choice.text) & set("() ")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fft(warmup_steps=0, bits=8)", {"warmup_steps": 0, "bits": 8}),
        ("fft:ranks_per_node=auto", {"ranks_per_node": "auto"}),
        ("fft:dense_every=10,dense_by=none", {"dense_every": 10, "dense_by": "none"}),
        ("dither(ratio=160, momentum=0.9, dense_every=50, dense_by=dither(ratio=40, bucket=128))",
         {"ratio": 160.0, "momentum": 0.9, "dense_every": 50,
          "dense_by": "dither(ratio=40, bucket=128)"}),
    ],
)  # fmt: skip
def test_settings_of_a_training_stand_among_a_recipes_options(text, settings):
    choice, none = parse_recipes(f"{text},none")
    assert choice.options == settings
    assert none.name == "none"
    for written in (choice.text, choice.label):
        assert parse_recipe(written) == choice
    policy = make_policy(choice.name, **choice.options)
    for name in ("warmup_steps", "ranks_per_node", "dense_every"):
        if name in settings:
            assert getattr(policy, name) == settings[name]


def test_settings_of_a_recipe_win_over_those_for_all(script, monkeypatch):
    """Those of the command, and no warm-up in jobs of a few steps."""
    given = []
    monkeypatch.setattr(run, "install", lambda *which: given.append(which[:2]))
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
    for recipe in ("fft(warmup_steps=7, ranks_per_node=2)", "fft"):
        with pytest.raises(SystemExit):
            main(["run", "--warmup-steps", "3", "--compression", recipe, str(script)])
    assert given == [
        ("fft", {"warmup_steps": 7, "ranks_per_node": 2}), ("fft", {"warmup_steps": 3}),
    ]  # fmt: skip
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fft:warmup_steps=some", "warmup_steps must be a whole number, got 'some'"),
        ("fft:warmup_steps=-1", "warmup_steps must be a whole number from 0 up, got -1"),
        (
            "fft:dense_every=1",
            "dense_every must be 0, for no dense steps, or a whole number from 2",
        ),
        ("fft:dense_every=9,dense_by=topk", "dense_by must be a recipe that sends all elements"),
        ("fft:dense_every=9,dense_by=bf16(warmup_steps=3)", "has no option warmup_steps"),
        ("dgc:dense_every=9", "no steps between are dense. Give dense_every=0"),
        ("fft:warmup=3", "has no option warmup"),
        ("fft:warmup=3", "and the settings warmup_steps, ranks_per_node, dense_every, dense_by"),
    ],
)
def test_settings_out_of_range_are_refused_before_a_job_starts(text, message, script, capsys):
    for option in ("--compression", "--compare"):
        assert message in refusal(capsys, option, text, script)


@pytest.mark.parametrize("text", ["", ":", "fft:", "fft:density", "density=1,fft:bits=8", "fft::"])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises((TypeError, ValueError)):
        parse_recipes(text)


def test_bad_arguments_are_told(capsys, script, monkeypatch):
    assert "unknown recipe 'fftt'" in refusal(capsys, "--compression", "fftt", script)
    error = refusal(capsys, "--compression", "fft:dense=1", script)
    assert "has no option dense" in error
    assert "density" in refusal(capsys, "--compression", "fft:density=7", script)
    assert "is 2 compressions" in refusal(capsys, "--compression", "fft,topk", script)
    assert "no script 'gone.py'" in refusal(capsys, "--compression", "fft", "gone.py")
    assert "required" in refusal(capsys, "--compression", "fft")
    assert "give --compression or --compare, or set HOROVOD_FFTCOMP" in refusal(capsys, script)
    assert "belong to --compare" in refusal(capsys, "--compression", "fft", "-np", 2, script)
    error = refusal(capsys, "--compare", "fft", "--record", "x", script)
    assert "belong to --compression" in error
    error = refusal(capsys, "--compare", "fft", "--report-json", script)
    assert "--report-json belongs to --compression" in error
    error = refusal(capsys, "--compare", "none,fft", "--launcher", "/no/launcher", script)
    assert "'/no/launcher' was not found" in error
    monkeypatch.setenv("HOROVOD_FFTCOMP_COMPRESSION", "fftt")
    assert "_COMPRESSION: unknown recipe 'fftt'" in refusal(capsys, script)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert "run it without a launcher" in refusal(capsys, "--compare", "none,fft", script)


@pytest.mark.parametrize("rank", [0, 1])
def test_usage_is_printed_by_one_rank_and_errors_by_all(rank, capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    for arguments in (["run", "--help"], ["--version"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert bool("".join(capsys.readouterr())) == (rank == 0)
    with pytest.raises(SystemExit):
        main(["run", "--compression", "fft", "missing.py"])
    told = capsys.readouterr().err
    assert ("usage:" in told) == (rank == 0)
    assert ("run on rank 1: error: there is no script 'missing.py'" in told) == (rank == 1)
    assert told.count("there is no script") == 1


@pytest.mark.parametrize("variable", ["HOROVOD_RANK", "TORCHELASTIC_RUN_ID"])
def test_commands_are_those_of_the_launcher_in_use(variable, monkeypatch):
    monkeypatch.setenv(variable, "0")
    told = run.told_of("topk", {"steps": 0})
    assert ("torchrun --nproc-per-node 2" in told) == variable.startswith("TORCH")
    assert ("horovodrun" in told) != variable.startswith("TORCH")


@pytest.mark.parametrize(
    ("ranks", "told"),
    [(1, "on one rank, 2.0 ms a step (median); nothing was sent, to no other rank; encode 1.0"),
     (2, "on 2 ranks, 2.0 ms a step (median); 1.000 MB sent by a rank in a step, 4.0 times less")],
)  # fmt: skip
def test_a_report_of_one_rank_says_that_nothing_was_sent(ranks, told):
    found = {"steps": 9, "world_size": ranks, "step_s": 0.002, "sent_nbytes": 1e6}
    found |= {"dense_nbytes": 4e6, "encode_s": 0.001, "wait_s": 0.0, "decode_s": 0.0}
    assert told in run.told_of("topk", found | {"warmup_steps": 8})
    dense = "MB sent by a rank in a step, all of them dense: --warmup-steps 0 compresses from the"
    assert (dense in run.told_of("topk", found | {"warmup_steps": 9})) == (ranks == 2)


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 5
    page = (ROOT / "docs" / "run.md").read_text()
    assert options <= set(re.findall(r"--[a-z][a-z-]+", page))


# The script.


def test_a_script_runs_as_main_with_its_arguments_and_its_exit_status(capsys, script):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--compression", "fft", str(script), "--compression", "x", "-np"])
    assert caught.value.code == 7
    printed = capsys.readouterr()
    assert "ran as __main__ ['--compression', 'x', '-np']" in printed.out
    assert "horovod-fftcomp run: fft: nothing was exchanged through horovod_fftcomp" in printed.err


def test_the_environment_gives_the_compression_that_no_option_gives(capsys, script, monkeypatch):
    monkeypatch.setenv("HOROVOD_FFTCOMP_COMPRESSION", "fft(density=0.2)")
    for arguments, used in (([], "fft(density=0.2)"), (["--compression", "topk"], "topk")):
        with pytest.raises(SystemExit) as caught:
            main(["run", *arguments, str(script), "-x"])
        assert caught.value.code == 7
        printed = capsys.readouterr()
        assert "ran as __main__ ['-x']" in printed.out
        assert f"horovod-fftcomp run: {used}: nothing was exchanged" in printed.err


def test_an_error_of_the_script_is_its_own(capsys, script):
    script.write_text("import neighbour\nraise KeyError(neighbour.__name__)\n")
    (script.parent / "neighbour.py").write_text("")
    with pytest.raises(KeyError, match="neighbour"):
        main(["run", "--compression", "fft", str(script)])
    assert "nothing was exchanged" in capsys.readouterr().err
    del sys.modules["neighbour"]


# What Horovod's wrappers are given; a module that looks like one of Horovod's.

FAKE = """
class Compression:
    none, fp16 = object(), object()
Average, Adasum = object(), object()
def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, op=Average,
                         process_set=None):
    return optimizer, named_parameters, compression, op
def load_model(path, compression=Compression.none):
    return DistributedOptimizer(path, compression=compression)
def DistributedGradientTape(gradtape, compression=Compression.none):
    return gradtape, compression
def PartialDistributedOptimizer(optimizer, compression=Compression.none):
    return optimizer, compression
def PartialDistributedGradientTape(gradtape, compression=Compression.none):
    return DistributedGradientTape(gradtape, compression)
class callbacks:
    class K:
        pass
    class tf:
        class keras:
            backend = "the backend of tf.keras"
"""


class FakeCompressor:
    def __init__(self, recipe, model, options):
        self.recipe, self.model, self.options = recipe, model, options


class FakeFactories:
    def __getattr__(self, recipe):
        return lambda model, **options: FakeCompressor(recipe, model, options)


@pytest.fixture
def horovod(tmp_path, monkeypatch):
    """Return a function that imports a module as a script would, after the wrapping."""
    package = tmp_path / "horovod"
    (package / "tensorflow" / "keras").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for path in (package / "torch.py", package / "tensorflow" / "__init__.py",
                 package / "tensorflow" / "keras" / "__init__.py"):  # fmt: skip
        path.write_text(FAKE)
    for name in list(sys.modules):
        if name.split(".")[0] == "horovod":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importing = importlib.import_module

    def import_module(name):
        if name in ("horovod_fftcomp.torch", "horovod_fftcomp.tensorflow"):
            return argparse.Namespace(Compression=FakeFactories())
        return importing(name)

    monkeypatch.setattr(
        "horovod_fftcomp.tools.run.import_hook.importlib.import_module", import_module
    )
    yield importing
    for name in list(sys.modules):
        if name.split(".")[0] == "horovod":
            del sys.modules[name]


@pytest.fixture
def made():
    found: list[FakeCompressor] = []
    Wrapping("fft", {"density": 0.2}, found.append).install()
    return found


def test_torch_gets_the_optimizers_parameters(horovod, made):
    hvd = horovod("horovod.torch")
    assert "torch.py" in hvd.DistributedOptimizer.__wrapped__.__code__.co_filename
    optimizer, named, compression, op = hvd.DistributedOptimizer(
        "sgd", iter([("a", 1), ("b", 2)]), op=hvd.Average, compression=hvd.Compression.none
    )
    assert (optimizer, named, op) == ("sgd", [("a", 1), ("b", 2)], hvd.Average)
    assert made == [compression]
    assert (compression.recipe, compression.model) == ("fft", named)
    assert compression.options == {"density": 0.2}
    unnamed = argparse.Namespace(param_groups=[{"params": [1, 2]}, {"params": [3]}])
    _, named, compression, _ = hvd.DistributedOptimizer(unnamed, process_set="evens")
    prefix = "allreduce.noname."
    assert named == [(f"{prefix}0.0", 1), (f"{prefix}0.1", 2), (f"{prefix}1.0", 3)]
    assert compression.options == {"density": 0.2, "process_set": "evens"}
    assert len(made) == 2


def test_keras_optimizers_and_the_tapes_of_a_loop_bind_late(horovod, made):
    keras, tensorflow = horovod("horovod.tensorflow.keras"), horovod("horovod.tensorflow")
    first, second = (keras.DistributedOptimizer(n)[2] for n in ("sgd", "adam"))
    assert first is not second
    assert first.model is None
    tapes = [tensorflow.DistributedGradientTape(n) for n in range(3)]
    assert [tape for tape, _ in tapes] == [0, 1, 2]
    tapes += [tensorflow.PartialDistributedGradientTape(3)]
    assert len({compression for _, compression in tapes}) == 1
    assert len(made) == 3
    optimizer, compression = keras.PartialDistributedOptimizer("sgd")
    assert (optimizer, compression.model) == ("sgd", None)  # so it binds to what is exchanged


def test_horovods_callbacks_get_the_backend_that_has_their_functions(horovod, made):
    assert horovod("horovod.tensorflow.keras").callbacks.K == "the backend of tf.keras"


def test_a_backend_that_horovods_callbacks_can_use_stays(horovod, tmp_path, made):
    path = tmp_path / "horovod" / "tensorflow" / "keras" / "__init__.py"
    path.write_text(
        FAKE.replace("    class K:\n        pass", "    class K:\n        constant = 1")
    )
    assert horovod("horovod.tensorflow.keras").callbacks.K.constant == 1


def test_a_wrapper_that_calls_another_makes_one_compressor(horovod, made):
    keras = horovod("horovod.tensorflow.keras")
    assert keras.load_model("model")[2] is made[0]
    assert len(made) == 1


def test_a_module_that_is_there_already_is_wrapped(horovod):
    hvd = horovod("horovod.torch")
    found: list[FakeCompressor] = []
    Wrapping("topk", {}, found.append).install()
    hvd.DistributedOptimizer("sgd", [("a", 1)])
    assert [one.recipe for one in found] == ["topk"]


def test_what_cannot_be_wrapped_is_refused(horovod, made, monkeypatch):
    hvd = horovod("horovod.torch")
    with pytest.raises(
        UnsupportedError, match=r"a compression= of its own .*remove it from the script"
    ):
        hvd.DistributedOptimizer("sgd", [], compression=hvd.Compression.fp16)
    with pytest.raises(UnsupportedError, match="Adasum"):
        hvd.DistributedOptimizer("sgd", [], op=hvd.Adasum)
    with pytest.raises(TypeError, match="missing a required argument"):
        hvd.DistributedOptimizer()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match="elastic"):
        hvd.DistributedOptimizer("sgd", [])
    assert not made


# The report.


class Steps:
    """A compressor that has taken steps: the first three are slow and large."""

    def __init__(self):
        self.n, self.sent, self.listeners = 0, 0, []

    def tensors(self):
        return []

    def on_step(self, listener):
        self.listeners.append(listener)

    def step(self, nbytes, seconds):
        time.sleep(seconds)
        self.n, self.sent = self.n + 1, self.sent + nbytes
        for listener in self.listeners:
            listener()

    def stats(self):
        found = dict.fromkeys(("encode_s", "wait_s", "decode_s"), 0.001 * self.n)
        return {"steps": self.n, "dense_nbytes": 100 * self.n, "sent_nbytes": self.sent, **found}

    def place(self):
        return {"rank": 0, "world_size": 2}

    def digest(self):
        return "abc"


def test_the_first_steps_do_not_count():
    report, steps = StepReport(), Steps()
    assert report.values() == {"steps": 0}
    report.watch(steps)
    for _ in range(3):
        steps.step(1000, 0.3)
    for _ in range(6):
        steps.step(10, 0.002)
    found = report.values()
    assert (found["steps"], found["sent_nbytes"], found["dense_nbytes"]) == (9, 10, 100)
    assert found["encode_s"] == pytest.approx(0.001)
    assert 0.002 <= found["step_s"] < 0.3
    assert (found["world_size"], found["digest"]) == (2, "abc")


def test_the_dense_steps_of_the_start_do_not_count():
    report, steps = StepReport(), Steps()
    steps.warmup_steps = 4
    report.watch(steps)
    for _ in range(7):
        steps.step(1000, 0.1)
    found = report.values()
    assert (found["steps"], found["sent_nbytes"]) == (7, 1000)  # there are no others
    for _ in range(5):
        steps.step(10, 0.002)
    found = report.values()
    assert (found["steps"], found["sent_nbytes"]) == (12, 10)
    assert len(found["blocks_s"]) == 1
    assert found["blocks_s"][0] == found["step_s"] < 0.1


def test_a_single_step_after_the_dense_ones_counts_alone():
    report, steps = StepReport(), Steps()
    steps.warmup_steps = 4
    report.watch(steps)
    for nbytes, seconds in ((1000, 0.1),) * 4 + ((10, 0.002),):
        steps.step(nbytes, seconds)
    found = report.values()
    assert (found["steps"], found["sent_nbytes"], found["dense_nbytes"]) == (5, 10, 100)
    assert found["step_s"] < 0.1


@pytest.mark.parametrize(
    ("given", "passed"),
    [(["--steps", "9"], "0"), (["--steps", "9", "--warmup-steps", "5"], "5"), ([], None)],
)
def test_jobs_of_few_steps_compress_from_the_first_one_on(given, passed, script, monkeypatch):
    commands = []

    def started(launcher, n_ranks, command, line):
        commands.append(command)
        return jobs.Ended(1, [])

    monkeypatch.setattr(jobs, "launch", started)
    with pytest.raises(SystemExit):
        main(["run", "--compare", "none", "--repeat", "1", *given, str(script)])
    [command] = commands
    options = dict(itertools.pairwise(command))
    assert options.get("--warmup-steps") == passed


def test_few_steps_all_count_and_a_number_of_them_ends_it():
    ends = []
    report, steps = StepReport(2, lambda: ends.append(steps.n)), Steps()
    report.watch(steps)
    steps.step(50, 0)
    assert report.values()["step_s"] is None
    steps.step(70, 0)
    steps.step(90, 0)
    assert report.values()["sent_nbytes"] == 70
    assert ends == [2]


def test_the_compressor_that_takes_steps_is_timed():
    ends = []
    report, idle, busy = StepReport(3, lambda: ends.append(1)), Steps(), Steps()
    report.watch(idle)
    report.watch(busy)
    for _ in range(2):
        busy.step(10, 0)
    assert report.values()["steps"] == 2
    report.disarm()
    busy.step(10, 0)
    assert not ends


def test_trainings_one_after_the_other_are_reported_and_count_together():
    ends: list[int] = []
    report = StepReport(5, lambda: ends.append(second.n))
    first, beside, second = Steps(), Steps(), Steps()
    report.watch(first)
    report.watch(beside)  # as of a GAN
    for _ in range(2):
        first.step(10, 0)
        beside.step(10, 0)
    report.watch(second)
    for _ in range(3):
        assert not ends
        second.step(30, 0)
    assert ends == [3]
    found = report.values()
    [earlier] = found["earlier"]
    assert (earlier["steps"], earlier["sent_nbytes"]) == (2, 20)
    assert (found["steps"], found["sent_nbytes"]) == (3, 30)
    lines = run.told_of("topk", found).splitlines()
    assert [line.split(": ")[2][:7] for line in lines] == ["2 steps", "3 steps"]


def test_a_model_that_is_made_after_the_first_step_of_another_one_may_train_beside_it():
    report, generator, discriminator = StepReport(), Steps(), Steps()
    report.watch(generator)
    generator.step(10, 0)
    report.watch(discriminator)
    for _ in range(5):
        discriminator.step(30, 0)
        generator.step(10, 0)
    found = report.values()
    assert "earlier" not in found
    assert found["steps"] == 6
    assert found["sent_nbytes"] == pytest.approx(40)  # of both, after the third step


def test_only_what_other_processes_have_reported_is_left_out(script):
    script.write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start(), worker.join()\n"
    )
    command = [sys.executable, "-m", "horovod_fftcomp", "run", "--compression", "fft", str(script)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "nothing was exchanged through horovod_fftcomp" in done.stderr


@pytest.mark.parallel
@pytest.mark.torch
@pytest.mark.parametrize("how", ["spawn", "fork", "commands"])
def test_ranks_that_the_script_starts_itself_are_compressed_or_refused(how):
    command = [
        "-m",
        "horovod_fftcomp",
        "run",
        "--compression",
        "topk:warmup_steps=0",
        "--steps",
        "5",
    ]
    done = subprocess.run(
        [sys.executable, *command, "tests/scripts/own_ranks.py", how],
        cwd=ROOT, text=True, capture_output=True, timeout=200,
    )  # fmt: skip
    if how == "commands":
        assert done.returncode == 1
        assert "UnsupportedError: ranks 1 do not run under `horovod-fftcomp run`" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stderr.split())
    assert re.findall(r"run: topk.*?: (\d+) steps on (\d+) ranks", told) == [("5", "2")]
    assert float(re.search(r"([\d.]+) times less than float32", told)[1]) > 5
    assert "nothing was exchanged" not in done.stderr


def test_the_end_of_training_is_raised_again_if_the_script_has_caught_it():
    compressor = object.__new__(Compressor)
    compressor.listeners = []
    with pytest.raises(run.StepsDone) as caught:
        compressor.end_training(run.StepsDone)
    assert caught.value.code is None  # status 0
    for listener in compressor.listeners:
        with pytest.raises(run.StepsDone):
            listener()
    assert len(compressor.listeners) == 1


# Jobs.


def launch(body: str, n: int = 2):
    lines: list[str] = []
    start = (
        "import subprocess, sys; n = int(sys.argv[2]); "
        "ranks = [subprocess.Popen([sys.executable, '-c', sys.argv[3], str(r)]) for r in range(n)];"
        "sys.exit(max(rank.wait() for rank in ranks))"
    )
    ended = jobs.launch([sys.executable, "-c", start], n, [body], lines.append)
    return ended, "".join(lines)


def wait_for_the_end_of(pid: int):
    """A process that was killed has some work to do before it is gone or a zombie."""
    status = Path(f"/proc/{pid}/status")
    give_up = time.monotonic() + 20
    while True:
        try:
            if "zombie" in status.read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < give_up, f"process {pid} still runs"
        time.sleep(0.01)


def test_ranks_report_through_their_output(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    body = (
        "import sys; from horovod_fftcomp.tools.run import launcher as jobs; r = int(sys.argv[1]);"
        r"sys.stdout.write(f'hello {r}\n');"  # at once; print would write it in pieces
        "jobs.report({'rank': r, 'twice': 2 * r}); sys.exit(3 * r)"
    )
    ended, output = launch(body)
    assert ended == (3, [{"rank": 0, "twice": 0}, {"rank": 1, "twice": 2}])
    assert sorted(output.splitlines()) == ["hello 0", "hello 1"]


def test_long_reports_come_in_lines_that_launchers_leave_whole(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    values = {"rank": 0, "tensors": [[f"layer{i}.weight", [64, 64, 3, 3]] for i in range(300)]}
    jobs.report(values)
    assert max(map(len, capsys.readouterr().out.splitlines())) < 1100
    body = (
        "from horovod_fftcomp.tools.run import launcher as jobs; print('fftcomp-report of my own');"
        "jobs.report({'rank': 0, 'tensors': [[f'layer{i}.weight', [64, 64, 3, 3]]"
        " for i in range(300)]})"
    )
    ended, output = launch(body, 1)
    assert ended.reports == [values]
    assert output == ""


def test_a_report_whose_lines_a_launcher_has_cut_is_none(monkeypatch):
    """As where it puts its tag into what it has read at once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    body = (
        "import io, sys; from horovod_fftcomp.tools.run import launcher as jobs;"
        "out, sys.stdout = sys.stdout, io.StringIO();"
        "jobs.report({'rank': 0, 'text': 5000 * 'x'}); text = sys.stdout.getvalue();"
        "out.write(text[:1500] + '[1,0]<stdout>:' + text[1500:])"
    )
    ended, _ = launch(body, 1)
    assert ended.reports == []


def test_what_a_launcher_leaves_behind_does_not_keep_it_waiting(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    body = (
        "import subprocess; from horovod_fftcomp.tools.run import launcher as jobs;"
        "jobs.report({'rank': 0, 'pid': subprocess.Popen(['sleep', '300']).pid})"
    )
    begin = time.monotonic()
    ended, _ = launch(body, 1)
    assert time.monotonic() - begin < 150
    [found] = ended.reports
    wait_for_the_end_of(found["pid"])


def test_ranks_that_do_not_end_after_their_reports_are_ended(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(jobs, "GRACE_S", 1.0)
    body = (
        "import os, sys, time; from horovod_fftcomp.tools.run import launcher as jobs;"
        "jobs.report({'rank': int(sys.argv[1]), 'pid': os.getpid()}); time.sleep(300)"
    )
    begin = time.monotonic()
    ended, _ = launch(body)
    assert time.monotonic() - begin < 150
    assert len(ended.reports) == 2
    for found in ended.reports:
        wait_for_the_end_of(found["pid"])


# What ends too early.

START = """
import os, subprocess, sys, time
ranks = [subprocess.Popen(sys.argv[3:], env=os.environ | {"HOROVOD_RANK": str(r)})
         for r in range(int(sys.argv[2]))]
while not any(rank.poll() for rank in ranks) and any(rank.poll() is None for rank in ranks):
    time.sleep(0.01)
for rank in ranks:
    rank.terminate()
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Return a launcher that starts ranks here, and ends all when one has failed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "launcher.py"
    path.write_text(START)
    return f"{sys.executable} {path}"


def test_a_failed_jobs_own_exception_is_named(capsys, monkeypatch, script, launcher, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")  # workers of pytest-xdist have 80
    began = tmp_path / "rank 0 has begun"  # before that no report of it could be had
    script.write_text(
        "import os, pathlib, time\n"
        f"began = pathlib.Path({str(began)!r})\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    while not began.exists(): time.sleep(0.01)\n"
        "    raise ValueError('my bug')\n"
        "began.touch()\n"
        "time.sleep(300)\n"
    )
    path = tmp_path / "compared.json"
    with pytest.raises(SystemExit) as caught:
        main(["run", "--compare", "none", "--repeat", "1", "--launcher", launcher,
              "--json", str(path), str(script)])  # fmt: skip
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert re.search(r"^none .* failed *$", printed, re.M), printed
    assert "\nnone: rank 1: ValueError: my bug; exit status" in printed
    [row] = json.loads(path.read_text())
    assert "my bug" in row["trouble"]
    assert row["status"] != 0


@pytest.fixture
def outputs(monkeypatch):
    """Replace jobs by ones whose output is the next of a list; return that list."""
    left: list[str] = []
    times = {f"{what}_s": 0.002 for what in ("step", "encode", "wait", "decode")}
    found = {"steps": 5, "digest": "same", "dense_nbytes": 4e6, "sent_nbytes": 1e6, **times}
    found["blocks_s"] = [0.002, 0.002]

    def ended(parsed, choice, n_ranks, line, number):
        for text in left.pop(0).format(number).splitlines(keepends=True):
            line(text)
        return jobs.Ended(0, [{"rank": rank, **found} for rank in range(n_ranks)])

    monkeypatch.setattr(run, "launch", ended)
    monkeypatch.setenv("COLUMNS", "180")
    return left


def test_the_last_number_that_the_metric_finds_is_averaged(outputs, capsys, script, tmp_path):
    path = tmp_path / "compared.json"
    outputs += ["acc 0.1\n[1,0]<stdout>:acc 0.9{}\n", "acc 0.5\n"]
    outputs += ["acc 0.9{}%, all\n", "acc 0.7\n"]
    main(["run", "--compare", "none,fft", "--metric", r"acc (\S+)", "--repeat", "2", "--json",
          str(path), str(script)])  # fmt: skip
    printed = capsys.readouterr()
    none, fft = re.findall(r"^(?:none|fft) .*", printed.out, re.M)
    expected = r" 2\.0 ±0 +- +1 +equal bits .* 4\.0 ±0 +0\.905 ±0\.06 +- "
    assert re.search(expected, none), none
    # The difference of metrics is -0.4 and -0.21: over one degree of freedom t is 12.7.
    assert re.search(r" no difference seen +1\.00 ±0 .* 0\.6 ±1 ", fft), fft
    assert re.search(r" no difference seen, ±1 ", fft), fft
    assert fft.count("±") == 9  # each figure has one
    assert "±: half of a 95 % interval" in printed.out
    assert "fft (job 4 of 4, about " in printed.err
    found = [(row["recipe"], row["repeat"], row["metric"]) for row in json.loads(path.read_text())]
    assert found == [("none", 0, 0.9), ("fft", 0, 0.5), ("none", 1, 0.91), ("fft", 1, 0.7)]


def test_a_metric_that_is_not_finite_leaves_the_table_and_the_file(
    outputs, capsys, script, tmp_path
):
    path = tmp_path / "compared.json"
    outputs += ["acc 0.5\n", "acc 0.5\n", "acc inf\n", "acc 0.7\n"]
    main(["run", "--compare", "none,none", "--metric", r"acc (\S+)", "--repeat", "2", "--json",
          str(path), str(script)])  # fmt: skip
    first, second = re.findall(r"^none .*", capsys.readouterr().out, re.M)
    assert "inf ±nan" in first
    assert "0.6 ±1 " in second
    assert "-inf ±nan" in second
    assert [row["place"] for row in json.loads(path.read_text())] == [0, 1, 0, 1]


def test_none_is_added_unless_refused_and_speed_ups_are_over_it(outputs, capsys, script):
    outputs += [""] * 2
    main(["run", "--compare", "fft", "--repeat", "1", str(script)])
    printed = capsys.readouterr()
    assert "none is added, for differences and speed-ups; not with --without-none" in printed.err
    none, fft = re.findall(r"^(?:none|fft) .*", printed.out, re.M)
    assert re.search(r" time vs none +speed-up ", printed.out)
    assert re.search(r"^fft +2\.0 +\+0\.0 % +1\.00 ", fft)
    assert "±" not in none + fft
    assert "One job of each: no ±, and what is noise is not known; --repeat 3 tells." in printed.out
    outputs += [""] * 6
    main(["run", "--compare", "fft,topk", "--without-none", str(script)])
    printed = capsys.readouterr()
    assert "added" not in printed.err
    assert "job 6 of 6" in printed.err  # three rounds
    assert re.search(r" time vs the first +ranks +MB sent ", printed.out)
    assert "No speed-up: that is over none. Differences are from fft." in printed.out


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_the_load_of_other_processes_is_noted(outputs, capsys, monkeypatch, load):
    busy_s, now_s = itertools.count(7, 10 * load), itertools.count(3, 10)
    monkeypatch.setattr(run.environment, "other_busy_s", lambda: next(busy_s))
    monkeypatch.setattr(run.environment, "n_cores", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    outputs += [""]
    parsed = argparse.Namespace(np=2, metric=None)
    row = run.row_of(parsed, parse_recipe("fft"), 0)
    assert row["load"] == load
    print_comparison([row | {"place": 0}])
    printed = capsys.readouterr().out
    told = f"Other processes kept {load} of this machine's 4 cores busy, {load} during one"
    assert told in printed
    assert ("Warning: that is over a quarter of the cores" in printed) == (load > 1)


def test_the_load_is_that_of_other_processes_on_own_cores(monkeypatch):
    assert environment.other_busy_s() <= time.monotonic() * environment.n_cores()
    #     user nice system idle iowait irq softirq steal guest
    stat = "cpu 9 9 9 9 9 9 9 9 9\ncpu0 800 0 0 5 5 0 0 0 0\ncpu1 500 100 200 7 9 20 30 50 500\n"
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 2.0, 0.5, 99.0))  # of ended children, too
    assert environment.other_busy_s() == pytest.approx(9 - 4)


def test_the_metric_of_a_script_that_steps_end_is_the_last_that_it_has_printed(
    outputs, capsys, script
):
    command = [
        "run",
        "--compare",
        "none",
        "--repeat",
        "1",
        "--metric",
        r"acc (\S+)",
        "--steps",
        "9",
    ]
    outputs += ["acc 0.5\nacc 0.6\n"]
    main([*command, str(script)])
    assert re.search(r"^none .* 0\.6 ", capsys.readouterr().out, re.M)
    outputs += ["epoch 1\n"]
    with pytest.raises(SystemExit):
        main([*command, str(script)])
    told = r"matches --metric 'acc (\\S+)' before its 9 --steps ended; its last lines:"
    assert told in capsys.readouterr().out


def test_a_node_without_the_first_rank_needs_no_metric(outputs, capsys, script, monkeypatch):
    plain = run.launch

    def of_second_node(*arguments):
        code, reports = plain(*arguments)
        return jobs.Ended(code, [report | {"rank": report["rank"] + 2} for report in reports])

    outputs += [""] * 4
    command = ["run", "--compare", "none,fft", "--repeat", "2", "--metric", r"acc (\S+)"]
    with monkeypatch.context() as patched:
        patched.setattr(run, "launch", of_second_node)
        main([*command, str(script)])
    assert outputs == []
    assert "metric" not in capsys.readouterr().out
    outputs += [""] * 4
    with pytest.raises(SystemExit):
        main([*command, str(script)])  # the same on the node of the first rank
    assert len(outputs) == 3


def test_equal_metrics_of_all_repeats_are_no_sign_of_certainty(outputs, capsys, script):
    outputs += ["acc 0.5\n", "acc 0.7\n"] * 3
    main(["run", "--compare", "none,fft", "--metric", r"acc (\S+)", str(script)])
    printed = capsys.readouterr().out
    assert re.search(r"^fft .* 0\.7 ±0 +\+0\.2 ±0 ", printed, re.M)
    assert "Repeats have equal metrics: with --seed {repeat}, say, ± would" in printed


def test_a_metric_that_no_line_has_ends_the_comparison(outputs, capsys, script):
    outputs += ["acc 0.5\n", "begins\nthe end of it\n", "acc 0.7\n"]
    with pytest.raises(SystemExit) as caught:
        main(["run", "--compare", "none,fft,topk", "--metric", r"acc (\S+)", str(script)])
    assert caught.value.code == 1
    printed = capsys.readouterr().out.split("─")[-1]
    assert re.search(r"^none .* equal bits .* 0\.5 ", printed, re.M)
    assert r"fft: no line of its output matches --metric 'acc (\\S+)'; its last lines:" in printed
    assert "\nbegins\nthe end of it." in printed
    assert outputs == ["acc 0.7\n"]  # whose job was not begun


def test_a_metric_that_is_no_number_is_told(outputs, capsys, script):
    outputs += ["acc high\n"]
    with pytest.raises(SystemExit):
        main(["run", "--compare", "none", "--repeat", "1", "--metric", r"acc (\S+)", str(script)])
    assert "none: its metric 'high' is not a number." in capsys.readouterr().out
    for pattern, told in (("acc (", "unterminated"), ("acc", "one pair of brackets")):
        assert told in refusal(capsys, "--compare", "none", "--metric", pattern, script)
    assert "belong to --compare" in refusal(capsys, "--compression", "fft", "--repeat", 2, script)


def test_repeats_have_a_number_that_the_script_can_take_as_a_seed(script, launcher, capfd):
    with pytest.raises(SystemExit):  # nothing was exchanged
        main(["run", "--compare", "none", "--repeat", "2", "--launcher", launcher, str(script),
              "--seed={repeat}"])  # fmt: skip
    printed = capfd.readouterr().out
    for number in (0, 1):
        assert printed.count(f"ran as __main__ ['--seed={number}']") >= 1


def test_what_other_ranks_raise_because_of_a_failure_is_left_out():
    def told(*failures: str, code: int = 1, n_ranks: int = 3) -> str:
        reports = [
            {"rank": rank, "steps": 0} | ({"failure": failure} if failure else {})
            for rank, failure in enumerate(failures)
        ]
        return run.trouble(jobs.Ended(code, reports), n_ranks)

    internal = "HorovodInternalError: Horovod has been shut down"
    assert told(internal, "KeyError: 'x'", "SIGTERM") == "rank 1: KeyError: 'x'; exit status 1"
    assert told("sys.exit(3)", "sys.exit(3)", code=3) == (
        "ranks 0, 1: sys.exit(3); 1 of 3 ranks gave no report; exit status 3"
    )
    assert told(internal, "", internal).startswith(f"ranks 0, 2: {internal}; ")
    assert told("", "", "", code=0).startswith("nothing was exchanged")
    assert "start it as" not in told("", "", "", code=0)


def test_an_interrupted_comparison_prints_what_there_is(script, launcher, tmp_path):
    script.write_text(
        "import os, time\n"
        "if os.path.exists('again'):\n"
        "    os.write(1, f'sleeps {os.getpid()}\\n'.encode())\n"
        "    time.sleep(300)\n"
        # Either rank of the first job may begin long after the other.
        "open('begun ' + os.environ['HOROVOD_RANK'], 'w')\n"
        "while not (os.path.exists('begun 0') and os.path.exists('begun 1')): time.sleep(0.01)\n"
        "time.sleep(1)\n"
        "open('again', 'w')\n"
    )
    command = [sys.executable, "-m", "horovod_fftcomp", "run", "--compare", "none,fft,topk",
               "--launcher", launcher, str(script)]  # fmt: skip
    process = subprocess.Popen(
        command,
        # MPI, initialized by another test of this process, may have set ranks behind os.environ.
        env=dict(os.environ),
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Shells let what they start in the background ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pids = []
    for line in process.stdout:
        if line.startswith("sleeps "):
            pids.append(int(line.split()[1]))
        if len(pids) == 2:
            process.send_signal(signal.SIGINT)
            break
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "1 of 9 jobs have ended." in errors
    assert set(re.findall(r"^(none|fft|topk) ", printed, re.M)) == {"none"}
    for pid in pids:
        wait_for_the_end_of(pid)


def test_sigterm_which_launchers_send_does_not_take_the_report_away(script, tmp_path):
    script.write_text(
        "import os, signal, time\n"
        "child = os.fork() or time.sleep(300)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print('child ended by', os.waitpid(child, 0)[1], flush=True)\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "horovod_fftcomp", "run", "--compression", "fft", str(script)]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == f"child ended by {signal.SIGTERM.value}\n"
    process.terminate()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "nothing was exchanged through horovod_fftcomp: the script ended in SIGTERM" in errors


def test_a_scripts_own_handler_of_sigterm_counts(script):
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(1)\n"
        "raise SystemExit(5)\n"
    )
    command = [sys.executable, "-m", "horovod_fftcomp", "run", "--compression", "fft", str(script)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout) == (5, "handled\n"), done.stderr


# On two ranks: an unedited script of PyTorch, and one of Keras.


@pytest.mark.parallel
@pytest.mark.torch
def test_torch_trains_to_the_bit_as_without_us_and_its_status_is_passed_on():
    script = "tests/scripts/torch_digits.py"
    _, plain = run_ranks(2, "gloo", script)
    code, wrapped = run_ranks(
        2, "gloo", "-m", "horovod_fftcomp", "run", "--compression", "none", script, "--fail"
    )
    assert code != 0
    losses = [re.findall(r"loss (\S+)|weights (\S+)", output) for output in (plain, wrapped)]
    assert len(losses[0]) == 16
    assert losses[0] == losses[1]
    assert re.search(r"run: none: 15 steps on 2 ranks, [\d.]+ ms a step", wrapped), wrapped


@pytest.mark.more
@pytest.mark.parallel
@pytest.mark.smoke
@pytest.mark.torch
def test_jobs_are_compared_and_end_after_their_steps(capfd, monkeypatch, tmp_path):
    pytest.importorskip("horovod")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(ROOT)
    path = tmp_path / "compared.json"
    main(["run", "--compare", "none,fft:density=0.1", "--steps", "8", "--repeat", "1",
          "--launcher", LAUNCHER,
          "--json", str(path), "tests/scripts/torch_digits.py", "--epochs", "1000"])  # fmt: skip
    printed = capfd.readouterr().out
    rows = re.findall(r"^(none|fft\(density=0.1\)) +([\d.]+) .* equal bits", printed, re.M)
    assert [name for name, _ in rows] == ["none", "fft(density=0.1)"], printed
    for row in json.loads(path.read_text()):
        assert row["trouble"] == ""
        assert [rank["steps"] for rank in row["ranks"]] == [8, 8]


@pytest.mark.parallel
@pytest.mark.torch
@pytest.mark.parametrize(
    ("script", "controller"),
    [
        ("torch_digits", "mpi"),
        ("torch_digits", "gloo"),
        pytest.param("keras_digits", "gloo", marks=pytest.mark.tf),
        pytest.param("tensorflow_digits", "mpi", marks=pytest.mark.tf),
    ],
)
def test_after_the_given_steps_a_script_cleans_up_and_ends_with_status_0(script, controller):
    code, output = run_ranks(
        2, controller, "-m", "horovod_fftcomp", "run", "--report-json", "--compression",
        "fft:density=0.1", "--warmup-steps", "0", "--steps", "5", "tests/scripts/cleans_up.py",
        f"tests/scripts/{script}.py",
        framework=script.partition("_")[0].replace("keras", "tensorflow"),
    )  # fmt: skip
    assert code == 0, output[-8000:]
    assert "swallowed" not in output
    assert output.count("cleaned up") == output.count("at exit") == 2, output[-8000:]
    reports = [json.loads(text) for text in re.findall(r"fftcomp-report \d+ 1 1 (.*)", output)]
    assert sorted((report["rank"], report["steps"]) for report in reports) == [(0, 5), (1, 5)]
    assert len({report["digest"] for report in reports}) == 1
    assert not any("failure" in report for report in reports)


@pytest.mark.parallel
@pytest.mark.torch
def test_a_rank_that_ends_first_leaves_the_others_their_last_exchange():
    """Of two nodes one may be done before the other."""
    code, output = run_ranks(
        4, "gloo", "-m", "horovod_fftcomp", "run", "--report-json", "--compression",
        "fft:density=0.1", "--ranks-per-node", "2", "--warmup-steps", "0", "--steps", "5",
        "tests/scripts/torch_digits.py", "--epochs", "1000",
    )  # fmt: skip
    assert code == 0, output[-8000:]
    reports = [json.loads(text) for text in re.findall(r"fftcomp-report \d+ 1 1 (.*)", output)]
    assert sorted(report["rank"] for report in reports) == [0, 1, 2, 3]
    assert len({report["digest"] for report in reports}) == 1


@pytest.mark.parallel
@pytest.mark.tf
@pytest.mark.parametrize("script", ["keras_digits", "tensorflow_digits"])
def test_tensorflow_trains_compressed_with_equal_bits_on_all_ranks(script):
    code, output = run_ranks(
        2, "gloo", "-m", "horovod_fftcomp", "run", "--report-json", "--compression",
        "fft:density=0.1", "--warmup-steps", "0", f"tests/scripts/{script}.py",
        framework="tensorflow",
    )  # fmt: skip
    assert code == 0, output[-8000:]
    reports = [json.loads(text) for text in re.findall(r"fftcomp-report \d+ 1 1 (.*)", output)]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert len({report["digest"] for report in reports}) == 1
    assert {report["steps"] for report in reports} == {15}
    assert all(report["dense_nbytes"] > 5 * report["sent_nbytes"] for report in reports)
    losses = [float.fromhex(text) for text in re.findall(r"loss (\S+)", output)]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parallel
@pytest.mark.tf
def test_local_layers_stay_out_of_the_exchange():
    """Sent whole, gradients are what Horovod makes of them, and local layers differ as before."""
    script, hashes = "tests/scripts/local_layers.py", []
    for how in ((), ("-m", "horovod_fftcomp", "run", "--compression",
                     "topk:density=1,bits=32,error_feedback=False")):  # fmt: skip
        code, output = run_ranks(2, "gloo", *how, script, framework="tensorflow")
        assert code == 0, output[-8000:]
        assert "Warning" not in output
        found = re.findall(r"(optimizer|tape): (shared|local) (\d) (\w+)\.", output)
        hashes.append({(what, kind, rank): weights for what, kind, rank, weights in found})
    assert len(hashes[0]) == 8
    assert hashes[0] == hashes[1]
    for what in ("optimizer", "tape"):
        assert hashes[1][what, "shared", "0"] == hashes[1][what, "shared", "1"]
        assert hashes[1][what, "local", "0"] != hashes[1][what, "local", "1"]
