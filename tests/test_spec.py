"""Specifications, which fingerprints and saved states are made from, do not drift."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from horovod_fftcomp.codec.transforms import BlockFFT
from horovod_fftcomp.wire.spec import spec_of
from tests.make_golden import SPECS, specifications


def test_specifications_and_state_formats_equal_the_golden_ones():
    written = SPECS.read_text().splitlines()
    assert written == specifications(), "run: make recipe; no line may change but by a new version"


def test_a_class_does_not_inherit_the_name_of_another():
    @dataclass(frozen=True)
    class Changed(BlockFFT):
        pass

    with pytest.raises(KeyError, match="spec_name"):
        spec_of(Changed())
