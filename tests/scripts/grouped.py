"""Two groups of cases; ``tests/test_groups.py`` runs these with two workers."""

from __future__ import annotations

import time

import pytest


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("group", [pytest.param(g, marks=pytest.mark.xdist_group(g)) for g in "ab"])
def test_a_case(group, case):
    time.sleep(0.05)
