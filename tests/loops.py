"""Many small cases as one test, so that one fault reddens one line of a report."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_SHOWN = 5
recipe = ""  # if given, loops go through this recipe's cases alone


def is_of_recipe(text: str) -> bool:
    """Return whether a test's name, or a case in words, is of ``recipe``."""
    return re.search(rf"(?<![a-z0-9_]){re.escape(recipe)}(?![a-z0-9_])", text) is not None


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Return a decorator like ``pytest.mark.parametrize``, whose test goes through all cases.

    It goes on after a case that fails, and tells how many do and the first of them. Several of
    them go through all combinations; they stand below ``pytest.mark.parametrize``. All cases share
    the fixtures of the test.
    """
    own = [name.strip() for name in names.split(",")]
    given = [dict(zip(own, value if len(own) > 1 else (value,), strict=True)) for value in values]

    def decorate(law: Callable[..., None]) -> Callable[[], None]:
        check, inner = getattr(law, "looped", (law, [{}]))
        cases = [{**case, **more} for case in given for more in inner]

        def test(**shared: Any) -> None:
            _check_all(check, cases, shared)

        test.__name__, test.__doc__, test.__module__ = law.__name__, law.__doc__, law.__module__
        test.__dict__.update(law.__dict__, looped=(check, cases))
        parameters = inspect.signature(check).parameters.values()
        rest = [parameter for parameter in parameters if parameter.name not in cases[0]]
        test.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
        return test

    return decorate


def in_words(case: dict[str, Any]) -> str:
    """Return names and values of a case."""
    return ", ".join(f"{name}={value!r}" for name, value in case.items())


def _check_all(
    check: Callable[..., None], cases: list[dict[str, Any]], shared: dict[str, Any]
) -> None:
    failed: list[tuple[str, BaseException]] = []
    skipped: list[str] = []
    # Without such a case, the test's own parameters have the recipe.
    cases = [case for case in cases if recipe and is_of_recipe(in_words(case))] or cases
    for case in cases:
        written = in_words(case)
        try:
            check(**case, **shared)
        except pytest.skip.Exception as reason:
            skipped.append(f"{written}: {reason}")
        except (Exception, pytest.fail.Exception) as error:
            failed.append((written, error))
    if failed:
        shown = [f"{written}: {error!r}" for written, error in failed[:_SHOWN]]
        raise AssertionError(
            "\n".join([f"{len(failed)} of {len(cases)} cases fail, first:", *shown])
        ) from failed[0][1]
    if skipped:
        pytest.skip(f"{len(skipped)} of {len(cases)} cases, first: {skipped[0]}")
