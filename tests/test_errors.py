"""Warnings name the line of the user's code, whatever frames of the package lie between."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from horovod_fftcomp import errors


def of_package(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function of the package that calls ``call``."""
    names: dict[str, Any] = {"__name__": "horovod_fftcomp.adapter", "call": call}
    exec("def function(): call()", names)
    function: Callable[[], None] = names["function"]
    return function


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def warns() -> None:
    errors.warn("something")


def calls_the_package() -> None:
    own: dict[str, Any] = {"__name__": "horovod_fftcomp.monitor", "warn": errors.warn}
    exec("def function(): warn('something')", own)
    of_package(own["function"])()


def is_the_package() -> None:
    own: dict[str, Any] = {"__name__": "horovod_fftcomp.monitor", "warn": errors.warn}
    exec("def function(): warn('something')", own)
    in_thread(of_package(own["function"]))


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (warns, __file__),
        (calls_the_package, __file__),
        (lambda: in_thread(calls_the_package), __file__),
        (is_the_package, threading.__file__),  # no code of the user is there
    ],
    ids=["directly", "through the package", "in a thread of the user", "in one of the package"],
)
def test_a_warning_names_the_users_line(start, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start()
    [told] = caught
    assert (str(told.message), told.category, told.filename) == ("something", RuntimeWarning, named)
