"""A test that loops over cases tells which of them fail."""

from __future__ import annotations

import pytest

from tests import loops
from tests.loops import each


def test_every_combination_is_checked_once():
    seen = []

    @each("a, b", [(1, 2), (3, 4)])
    @each("key", ["x", "y"])
    def test_pairs(key, a, b):
        seen.append((key, a, b))

    test_pairs()
    assert sorted(seen) == [("x", 1, 2), ("x", 3, 4), ("y", 1, 2), ("y", 3, 4)]
    assert test_pairs.__name__ == "test_pairs"


@pytest.mark.parametrize("a", [1, 2])
@each("b", [3, 4])
@each("c", [5])
def test_what_it_does_not_loop_over_is_left_to_pytest(tmp_path, a, b, c):
    (tmp_path / f"{b}").touch()
    assert len(list(tmp_path.iterdir())) == b - 2
    assert a in (1, 2)
    assert c == 5


def test_all_that_fail_are_counted_and_the_first_are_named():
    @each("n", range(20))
    def test_small(n):
        if n == 19:
            with pytest.raises(ValueError, match="nothing"):
                pass
        assert n < 3, "too large"

    with pytest.raises(AssertionError) as caught:
        test_small()
    lines = str(caught.value).splitlines()
    assert lines[0] == "17 of 20 cases fail, first:"
    assert lines[1].startswith("n=3: AssertionError('too large")
    assert len(lines) == 6
    assert caught.value.__cause__.args[0].startswith("too large")


def test_a_case_that_is_skipped_is_told_after_all_others():
    seen = []

    @each("n", range(3))
    def test_some(n):
        if n == 1:
            pytest.skip("no library")
        seen.append(n)

    with pytest.raises(pytest.skip.Exception, match="1 of 3 cases, first: n=1: no library"):
        test_some()
    assert seen == [0, 2]


def test_only_the_cases_of_a_recipe_are_gone_through_if_there_are_some(monkeypatch):
    seen = []

    @each("key", ["topk", "topk-2-bits", "gtopk", "topk_plus", "sign"])
    def test_keys(key):
        seen.append(key)

    monkeypatch.setattr(loops, "recipe", "topk")
    test_keys()
    assert seen == ["topk", "topk-2-bits"]
    assert loops.is_of_recipe("test_a_step[topk-options3]")
    assert not loops.is_of_recipe("test_topk_is_fast")
    monkeypatch.setattr(loops, "recipe", "fft")  # a parameter of pytest, say
    test_keys()
    assert seen[2:] == ["topk", "topk-2-bits", "gtopk", "topk_plus", "sign"]
