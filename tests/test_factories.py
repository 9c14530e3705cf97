"""The factories say what they take: to ``help``, to editors and to type checkers."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import inspect
import pickle
import pydoc
import re
from typing import get_type_hints

import pytest

from horovod_fftcomp.adapter.factories import Factories, declaration, keywords_of
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.cli import main as command_line
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes.options import kinds_of
from tests.make_stubs import PACKAGE, PATH, stub


@dataclasses.dataclass
class Given:
    """What a compressor would be made of.

    model
        A model.
    """

    model: str
    policy: object
    settings: object


class Compression(metaclass=Factories):
    """Factories that need no framework."""

    _make = Given


def test_every_option_and_setting_is_in_the_signature_with_its_type_and_default():
    keywords = dict(inspect.signature(make_policy).parameters)
    del keywords["recipe"], keywords["options"]
    shared = {**keywords, **inspect.signature(Settings).parameters}
    for name, recipe in RECIPES.items():
        factory = getattr(Compression, name)
        model, *parameters = inspect.signature(factory).parameters.values()
        assert (model.name, model.kind) == ("model", model.POSITIONAL_OR_KEYWORD), name
        assert all(each.kind == each.KEYWORD_ONLY for each in parameters), name
        defaults = {other: parameter.default for other, parameter in shared.items()}
        expected = recipe.options | defaults
        assert [(each.name, each.default) for each in parameters] == list(expected.items()), name
        kinds = kinds_of(make_policy) | kinds_of(Settings) | kinds_of(recipe.make)
        types = {each.name: each.annotation for each in parameters}
        assert types == {option: kinds[option] for option in expected}, name
        assert get_type_hints(factory) == types | {"model": str, "return": Given}, name


def test_help_describes_every_parameter():
    for name, recipe in RECIPES.items():
        factory = getattr(Compression, name)
        assert inspect.isroutine(factory)
        assert inspect.getdoc(factory).startswith(f"Return a compressor: {recipe.summary}.")
        text = pydoc.plain(pydoc.render_doc(factory))
        for parameter in inspect.signature(factory).parameters.values():
            entry = f"\n    {declaration(parameter)}\n        "
            assert entry in text, f"{name}: {declaration(parameter)}"
            assert text.split(entry)[1][0].strip(), f"{name}.{parameter.name} has no description"
        assert recipe.source in text


@pytest.mark.torch
def test_help_of_compress_describes_every_option_of_every_recipe():
    compress = pytest.importorskip("horovod_fftcomp.torch_distributed").compress
    text = pydoc.plain(pydoc.render_doc(compress))
    assert len(inspect.signature(compress).parameters) == 4
    recipes, options, settings = re.split(r"\n    -{5,}\n", text)[1:]
    for name, recipe in RECIPES.items():
        own = [each for each in keywords_of(name) if each.name in recipe.options]
        expected = f" {name}({', '.join(map(declaration, own))}) {recipe.summary} "
        assert expected in f" {' '.join(recipes.split())}", name
        for option in recipe.options:
            assert re.search(rf"^    {option}\n        \S", options, re.M), f"{name}.{option}"
    for each in keywords_of("none"):
        told = f"    {declaration(each)}\n        " in settings
        assert told == (each.name != "process_set"), each.name


def test_no_description_is_of_an_option_that_no_recipe_has():
    described = re.findall(r"^([\w.]+)\n    \S", inspect.getdoc(get_scheme), re.M)
    assert len(set(described)) == len(described)
    own = {f"{name}.{option}" for name, recipe in RECIPES.items() for option in recipe.options}
    assert {each for each in described if "." in each} <= own
    assert {each for each in described if "." not in each} <= {o.split(".")[1] for o in own}
    assert "min_numel: int = 1024" in inspect.getdoc(Compression.none)


def test_the_command_line_describes_one_recipe(capsys):
    command_line(["recipes", "scalecom"])
    printed = capsys.readouterr().out
    for parameter in keywords_of("scalecom"):
        assert f"\n{declaration(parameter)}\n    " in printed
    assert "16 for float16 or 32 for float32" in printed


def test_factories_can_be_pickled_and_copied():
    for again in (pickle.loads(pickle.dumps(Compression.fft)), copy.deepcopy(Compression.fft)):
        assert repr(again) == "Compression.fft"
        assert inspect.signature(again) == inspect.signature(Compression.fft)
        assert again("model", bits=8) == Compression.fft("model", bits=8)


def test_the_stub_is_fresh():
    written = PATH.read_text(encoding="utf-8")
    assert written == stub(), "run: make recipe"
    made, overloaded = (n for n in ast.parse(written).body if isinstance(n, ast.ClassDef))
    methods = {node.name: node.args for node in made.body if isinstance(node, ast.FunctionDef)}
    del methods["parse"]
    calls = [ast.unparse(n.args) for n in overloaded.body if isinstance(n, ast.FunctionDef)]
    names = [re.search(r"recipe: (?:Literal\['(\w+)'\]|str)", call)[1] for call in calls]
    assert names == [*RECIPES, None]
    assert list(methods) == list(RECIPES)
    for name, arguments in methods.items():
        given = [(each.arg, ast.literal_eval(default)) for each, default in
                 zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # fmt: skip
        assert given == [(each.name, each.default) for each in keywords_of(name)], name


CALLS = """\
from typing import Any
from horovod_fftcomp import Recover, schedules
from horovod_fftcomp.tensorflow import Compression as OfTensorFlow
from horovod_fftcomp.torch import Compression
from horovod_fftcomp.torch_distributed import compress

class Model:
    trainable_variables = ["weight"]

model = [("weight", 1)]
rules = [("conv*", 0.5), (lambda tensor: tensor.shape == (1,), {"recipe": "fft", "bits": 8})]
Compression.topk(model, density=0.01, bits=8, scope="bucket", rules=rules, timeout_s=60)
Compression.fft(model, density_schedule={0: 1.0, 5: 0.1}, recover=Recover(), record="a")
Compression.fft(model, density_schedule=schedules.Linear(1.0, 0.1, 50)).set_density(0.1)
OfTensorFlow.fft()
OfTensorFlow.fft(Model(), bits=8)
Compression.topk(model, densty=0.01)  # Unexpected keyword argument "densty"
Compression.topk(model, density="x")  # "density" to "topk" of "Compression" has incompatible type
Compression.topk(model, scope="layer")  # incompatible type "Literal['layer']"
Compression.topk(model, timeout_s=None)  # incompatible type "None"; expected "float"
Compression.topk(model, on_timeout="wait")  # expected "Literal['raise', 'warn']"
Compression.topk(model, rules=["conv*"])  # List item 0 has incompatible type "str"
Compression.topk(model, 0.01)  # Too many positional arguments
Compression.tpk(model)  # has no attribute "tpk"
Compression.fft(model).set_denstiy(0.1)  # "TorchCompressor" has no attribute "set_denstiy"
OfTensorFlow.fft(Model(), bit=8)  # Unexpected keyword argument "bit"
OfTensorFlow.powersgd(Model(), rank=1.5)  # incompatible type "float"; expected "int"
OfTensorFlow.fft(3)  # incompatible type "int"

named = str("fft")
mixed = dict[str, Any](density=0.1, scope="bucket")
compress(model)
compress(model, ratio=40, timeout_s=60)
compress(model, "topk", density=0.01, bits=8, scope="bucket", rules=rules)
compress(model, recipe="powersgd", replicate="mesh", rank=8).set_density(0.1)
compress(model, "fft:density=0.1,bits=8", min_numel=10)
compress(model, named, warmup_steps=5)
compress(model, named, **mixed)
compress(model, "topk", densty=0.01)  # No overload variant of "__call__" of "Compress"
compress(model, "topk", density="x")  # No overload variant
compress(model, "topk", rank=4)  # No overload variant
compress(model, "topk", scope="layer")  # No overload variant
compress(model, density=0.1)  # No overload variant
compress(model, "fft", timeout_s=None)  # No overload variant
compress(model, "fft", process_set=None)  # No overload variant
compress(model, 0.1)  # No overload variant
compress(model, named, warmup_step=5)  # No overload variant
compress(model, "fft").set_denstiy(0.1)  # "DistributedCompressor" has no attribute
"""


@pytest.mark.more
def test_a_type_checker_finds_misspelt_and_wrong_options(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "calls.py").write_text(CALLS)
    monkeypatch.setenv("MYPYPATH", str(PACKAGE.parent))
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    # Without PyTorch and TensorFlow, which take minutes.
    options += ["--no-site-packages", "--cache-dir", str(tmp_path / "cache")]
    printed, problems, _ = api.run([*options, str(tmp_path / "calls.py")])
    assert not problems
    found = {int(line): told for line, told in re.findall(r":(\d+): error: (.+)", printed)}
    lines = enumerate(CALLS.splitlines(), 1)
    expected = {line: text.split("  # ")[1] for line, text in lines if "  # " in text}
    assert found.keys() == expected.keys(), printed
    for line, part in expected.items():
        assert part in found[line]


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("tensorflow", marks=pytest.mark.tf),
    ],
)
def test_factories_of_every_framework_take_the_same_but_for_the_model(framework):
    for needed in (framework, "horovod"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    factories = importlib.import_module(f"horovod_fftcomp.{framework}").Compression
    for recipe in RECIPES:
        factory = getattr(factories, recipe)
        model, *others = inspect.signature(factory).parameters.values()
        assert model.name == "model"
        assert list(map(str, others)) == list(map(str, keywords_of(recipe)))
        text = inspect.getdoc(factory)
        assert "Parameters\n----------\nmodel: " in text
        assert "    The " in text.split("\ndensity")[0]


def test_a_compressor_is_made_from_what_the_command_line_reads():
    for text in ("fft:density=0.1,bits=8", "fft(density=0.1, bits=8)"):
        assert Compression.parse(text, "m").policy == make_policy("fft", density=0.1, bits=8)
    found = Compression.parse("fft:density=0.1", "m", density=0.2, warmup_steps=3, min_numel=7)
    assert found.policy == make_policy("fft", density=0.2, warmup_steps=3)
    assert (found.model, found.settings) == ("m", Settings(min_numel=7))
    with pytest.raises(ValueError, match="'fft:'"):
        Compression.parse("fft:", "m")
    with pytest.raises(ValueError, match="2 compressions"):
        Compression.parse("fft,topk", "m")
    with pytest.raises(TypeError, match=r"a compression is a str such as .*, got 0\.1"):
        Compression.parse(0.1, "m")
