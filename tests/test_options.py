"""No option and no setting takes a value that is not meant: of another type, or out of range."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest

from horovod_fftcomp import Recover, UnsupportedError, get_scheme, schedules, simulate
from horovod_fftcomp.adapter.factories import Factories, documentation, keywords_of
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.policy import KEYWORDS, check_rules, make_policy
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.errors import FFTCompError
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes.options import kinds_of
from tests.loops import each

HUGE = 10**400  # beyond float
OPTIONS = [(recipe, option) for recipe in RECIPES for option in RECIPES[recipe].options]
SETTINGS = {field.name: field.default for field in dataclasses.fields(Settings)}

# Numbers out of range, by option; those of a recipe before those of all. Without an entry: next to
# the ends of the range that the description tells.
OUT_OF_RANGE = {
    "bits": [-1, 0, 1, 17, 31, 33, 64],
    "dorefa.bits": [-1, 0, 13, 32],
    "scalecom.bits": [-1, 0, 1, 4, 8, 17, 64],
    "arctopk.bits": [-1, 0, 1, 4, 8, 17, 64],
    "arctopk.block": [-8, 0, 1, 4, 100, 8192],
    "block": [-64, 0, 1, 32, 63, 100, 1 << 30],
    "second_density": [0, -0.1, 1.0000001],
    "second_bits": [-1, 0, 1, 17, 31, 64],
    "seed": [-1, 2**64],
    "threshold": [0, -1, 1e-40, 1e39],
    "calibrate_steps": [0, -1],
    "bucket": [0, -64, 1, 100, 1 << 30],
    "clip": [-0.1],
    "bin": [0, -1],
    "ratio": [0, 0.5, -50, 10_001],
    "every": [0, -1],
    "max_norm": [0, -1],
    "rows": [-1, 0, 2, 4, 10, 11],
    "warmup_steps": [-1],
    "dense_every": [-1, 1],
    "min_numel": [0, -1],
    "bucket_nbytes": [0, -1],
    "record_every": [0, -1],
    "live_every": [0, -1],
    "timeout_s": [0, -1, 1e10],
}
# What is neither a number, a bool nor one of some words.
OTHERS = {
    "density_schedule": ["0.1", "yes", True, [0.1], {}, {5: 0.1}, {0: "0.1"}, {0: 2}, 0, 1.5],
    "ranks_per_node": [0, -1, "two", "", "Auto", 1.5, True, None, [2], np.ones(2), math.nan],
    "dense_by": [0, True, None, b"bf16", ["bf16"], "topk", "onebit", "qsgd(error_feedback=true)"],
    "rules": ["conv*", "", {"conv*": "dense"}, 3, None, True, iter(())],
    "process_set": [0, "global", True, [0, 1]],
    "recover": [0, False, True, "yes", 2.0, {"factor": 2.0}, Recover],
    "record": [0, False, True, 3, b"grads", ["grads"]],
    "live_view": [0, False, True, 3, b"live.jsonl", ["live.jsonl"]],
}
ELSEWHERE = {"grad_scaler", "scalars"}  # the adapters know what these have to have


RANGES = {  # as descriptions tell them, and numbers beyond their ends
    r"above (\d+) and at most (\d+)": lambda low, high: [low, low - 0.1, 1.0000001 * high],
    r"from (\d+) to below (\d+)": lambda low, high: [low - 0.1, float(high), 2 * high],
    r"([\d,]+) to ([\d,]+)": lambda low, high: [low - 1, low - 2, high + 1],
    r"above (\d+)": lambda low: [low, low - 0.1, low - 2],
}


def out_of_range(recipe, name):
    """Return numbers that an option may not have."""
    for key in (f"{recipe}.{name}", name):
        if key in OUT_OF_RANGE:
            return OUT_OF_RANGE[key]
    own = [each for each in keywords_of(recipe) if each.name == name]
    described = documentation(recipe, own).split("----------")[1]
    for form, numbers in RANGES.items():
        if found := re.search(form, described):
            return numbers(*(int(end.replace(",", "")) for end in found.groups()))
    return pytest.fail(
        f"describe {name} with its range in get_scheme of horovod_fftcomp/recipes.py, as "
        "'1 to 64', 'above 0' or 'above 0 and at most 1', or add it to OUT_OF_RANGE"
    )


def wrong_for(kind, name, recipe=None):
    """Return what an option of this annotated type may not be."""
    kinds = {get_origin(one) or one for one in get_args(kind)} or {get_origin(kind) or kind}
    common = [[], {}, object(), b"1", 1j, np.ones(2), np.array([])]
    if type(None) not in kinds:
        common.append(None)
    if bool in kinds:
        return [*common, 0, 1, 0.0, 1.0, "true", "false", "no", "", np.True_, np.False_]
    if Literal in (get_origin(kind), *kinds):
        return [*common, "", "nonsense", 0, 1, 0.5, True, False]
    strings = ["1", "0.1", "4", "", "yes", "nan"]
    bounds = out_of_range(recipe, name)
    if kinds & {int}:
        return [*common, *strings, True, False, 1.0, 64.0, math.nan, np.float32(8), *bounds]
    assert kinds & {float}, f"{name}: say here what a {kind} may not be"
    broken = [math.nan, math.inf, -math.inf, np.float32("nan"), HUGE, -HUGE]
    return [*common, *strings, True, False, np.True_, *broken, *bounds]


def assert_refused(make, name, wrong):
    """Check that each value of ``wrong`` ends with an error that names the option and the value."""
    for value in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            print(name, repr(value)[:50], make(**{name: value}))
        text = str(caught.value)
        assert name in text
        assert "got" in text or "density=" in text
        types = (str, bool, type(None), np.bool_)
        if isinstance(value, types) and "one of" not in text:
            assert isinstance(caught.value, TypeError), text


@each("recipe, option", OPTIONS)
def test_no_option_takes_a_value_of_another_type_or_out_of_range(recipe, option):
    wrong = wrong_for(kinds_of(RECIPES[recipe].make)[option], option, recipe)
    assert_refused(lambda **given: get_scheme(recipe, **given), option, wrong)
    assert_refused(lambda **given: make_policy(recipe, **given), option, wrong)


@each("name", SETTINGS)
def test_no_setting_takes_a_value_of_another_type_or_out_of_range(name):
    if name not in ELSEWHERE:
        kind = kinds_of(Settings)[name]
        assert_refused(Settings, name, OTHERS[name] if name in OTHERS else wrong_for(kind, name))


@each("name", KEYWORDS)
def test_no_keyword_of_a_policy_takes_a_value_of_another_type_or_out_of_range(name):
    kind = inspect.signature(make_policy, eval_str=True).parameters[name].annotation
    wrong = OTHERS[name] if name in OTHERS else wrong_for(kind, name)
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=r"got|say the density"):
            make_policy("topk", **{name: value})
    assert {*KEYWORDS, "recipe", "options"} == set(inspect.signature(make_policy).parameters)


@each("recipe, option", OPTIONS)
def test_every_option_has_a_type_and_a_default_of_it(recipe, option):
    default = RECIPES[recipe].options[option]
    assert RECIPES[recipe].checked({option: default}) == {option: default}
    kind = kinds_of(RECIPES[recipe].make)[option]
    for choice in get_args(kind) if get_origin(kind) is Literal else ():
        get_scheme(recipe, **{option: choice})


def test_numbers_of_numpy_become_built_in_ones():
    plain = get_scheme("auto", ratio=20, every=3)
    numpys = get_scheme("auto", ratio=np.float32(20), every=np.int64(3))
    assert repr(numpys) == repr(plain)
    assert repr(get_scheme("fft", bits=np.uint8(8))) == repr(get_scheme("fft", bits=8))
    policy = make_policy("fft", bits=np.int64(8), warmup_steps=np.int64(2))
    assert policy == make_policy("fft", bits=8, warmup_steps=2)
    settings = Settings(min_numel=np.int64(5), timeout_s=np.float32(2), record=Path("a"))
    assert settings == Settings(5, timeout_s=2.0, record=Path("a"))
    assert type(settings.min_numel) is int
    assert isinstance(settings.record, os.PathLike)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"error_feedback": "false"},
            r"must be True or False, got 'false' \(str\); for example er",
        ),
        ({"density": "0.1"}, r"density must be a number, got '0.1' \(str\); for example density=0"),
        ({"bits": 8.0}, r"bits must be a whole number, got 8.0 \(float\); for example bits=4"),
        ({"bits": None}, "bits must be a whole number, got None; for example bits=4"),
        ({"densty": 0.1}, r"no option densty \(did you mean density\?\); it has: density, bits"),
        ({"budget": 5}, r"no option budget; it has"),  # like none of them
        ({"warmup_step": 5}, r"\(did you mean warmup_steps\?\); it .* settings warmup_steps, dens"),
    ],
)
def test_what_is_wrong_with_an_option_is_told(options, message):
    with pytest.raises(TypeError, match=message):
        simulate("fft", np.ones((1, 2, 64), np.float32), **options)


@pytest.mark.parametrize(
    "rule",
    [("*", None), ("*", True), ("*", np.True_), ("*", "0.5"), ("*", [0.5]), ("*", 0), ("*", 2),
     ("*", {"bits": "8"}), ("*", {"recipe": 3}), ("*", {"recipe": []}), (3, 0.5), ["*", 0.5]],
)  # fmt: skip
def test_no_rule_takes_another_action(rule):
    with pytest.raises((TypeError, ValueError)):
        check_rules([rule], make_policy("topk"))


def test_a_string_in_a_schedule_is_told_by_its_type():
    with pytest.raises(ValueError, match=r"Linear.start must lie .* got '0.1'; .* number.* str"):
        schedules.Linear("0.1", 0.2, 5)


@each("recipe", [r for r, o in OPTIONS if o == "error_feedback"])
@each("word", ["false", "False", "NO", "0", "true", "Yes", "1"])
def test_the_command_line_reads_what_is_meant_by_yes_and_no(recipe, word):
    wanted = word.lower() in ("true", "yes", "1")
    for text in (f"{recipe}:error_feedback={word}", f"{recipe}(error_feedback={word})"):
        choice = parse_recipe(text)
        assert choice.options == {"error_feedback": wanted}
        assert choice.label == f"{recipe}(error_feedback={wanted})"
        assert parse_recipe(choice.text) == choice


def test_the_command_line_shows_the_values_in_force():
    assert parse_recipe("adacomp:bin=none").options == {"bin": None}
    assert parse_recipe("adacomp:bin=None").label == "adacomp(bin=None)"
    assert parse_recipe("topk:density=1,scope=model").label == "topk(density=1.0, scope=model)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fft:error_feedback=maybe", "error_feedback must be True or False, got 'maybe'"),
        ("fft:error_feedback=2", "error_feedback must be True or False, got 2"),
        ("fft:error_feedback=0.0", "error_feedback must be True or False, got 0.0"),
        ("fft:error_feedback=none", "error_feedback must be True or False, got 'none'"),
        ("fft:bits=true", "bits must be a whole number, got 'true'"),
        ("fft:bits=none", "bits must be a whole number, got 'none'"),
        ("fft:bits=8.0", "bits must be a whole number, got 8.0"),
        ("fft:density=-0.1", r"density must lie in \(0, 1\], got -0.1"),
        ("fft:density=nan", "density must be a number, got 'nan'"),
        ("fft:density='0.1'", "density must be a number, got '0.1'"),
        ("topk:scope=layer", "scope must be one of tensor, bucket, model; got 'layer'"),
        ("fft:densty=0.1", r"no option densty \(did you mean density\?\)"),
    ],
)
def test_the_command_line_refuses_what_it_cannot_mean(text, message):
    with pytest.raises(Exception, match=message):
        parse_recipe(text)


class Compression(metaclass=Factories):
    """Makes no compressor, but what it would be made of."""

    _make = namedtuple("_make", "model policy settings")


def test_factories_take_options_and_settings_and_name_what_is_meant():
    model, policy, settings = Compression.fft("model", bits=8, warmup_steps=2, min_numel=3)
    assert (model, settings) == ("model", Settings(min_numel=3))
    assert policy == make_policy("fft", bits=8, warmup_steps=2)
    for name, meant in (("warmup_step", "warmup_steps"), ("recrd", "record"), ("bit", "bits")):
        with pytest.raises(TypeError, match=rf"no option {name} \(did you mean {meant}\?\)"):
            Compression.fft("model", **{name: 1})
    with pytest.raises(TypeError, match=r"it has: none; and the settings .*, rules, .*, timeout_s"):
        Compression.none("model", levels=1)


@pytest.mark.parametrize("given", [Compression, Compression.topk])
def test_a_factory_in_the_place_of_a_compressor_names_the_mend(given):
    factory = "Compression.fft" if given is Compression else "Compression.topk"
    for use in (given.compress, given.reduced, lambda grad: given.decompress(grad, None)):
        with pytest.raises(UnsupportedError, match=rf"give compression={factory}\(model\)"):
            use(None)
    assert {given: 1}[given] == 1
    assert issubclass(UnsupportedError, FFTCompError)
