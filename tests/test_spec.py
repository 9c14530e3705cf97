"""Specifications, which fingerprints and saved states are made from, do not drift."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from horovod_fftcomp.codec.transforms import BlockFFT
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.wire.spec import spec_of
from tests.contracts import CODECS, make_codec

FILE = Path(__file__).parent / "golden" / "specs.txt"


def test_specifications_and_state_formats_equal_the_golden_ones():
    lines = [f"{name}: {get_scheme(name).spec()}" for name in RECIPES]
    lines += [
        f"state of {name}: {get_scheme(name).state_format(Tensor('w', (8, 6)))}" for name in RECIPES
    ]
    between_nodes = make_policy("topk", ranks_per_node=2, scope="model").at(0)
    lines += [f"between nodes: {between_nodes.spec()}"]
    lines += [f"codec {key}: {make_codec(key).spec()}" for key in CODECS]
    assert FILE.read_text().splitlines() == lines


def test_a_class_does_not_inherit_the_name_of_another():
    @dataclass(frozen=True)
    class Changed(BlockFFT):
        pass

    with pytest.raises(KeyError, match="spec_name"):
        spec_of(Changed())
