"""Reads from CUDA sources which parameters a kernel writes to, and which must not overlap them."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

_KERNEL = re.compile(
    r"__global__ void (?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(([^()]*)\)"
)


class Parameter(NamedTuple):
    """A parameter of a kernel, the ``place``-th.

    ``is_written``: a pointer, not to const. ``is_restrict``: what it points to is not written in
    another way, which the compiler relies on.
    """

    place: int
    name: str
    is_written: bool
    is_restrict: bool


@functools.cache
def signatures(source: str) -> dict[str, list[Parameter]]:
    """Return the parameters of each kernel, by the name of the kernel or of its template."""
    found = dict(_KERNEL.findall(re.sub(r"//[^\n]*", "", source)))
    assert len(found) == source.count("__global__ void"), "a kernel's signature was not read"
    return {
        name: [_parameter(*each) for each in enumerate(listed.split(","))]
        for name, listed in found.items()
    }


def _parameter(place: int, text: str) -> Parameter:
    is_written = "*" in text and "const " not in text
    return Parameter(place, text.split()[-1].lstrip("*"), is_written, "__restrict__" in text)


@functools.cache
def must_not_overlap(source: str, name: str) -> list[tuple[Parameter, Parameter]]:
    """Return pairs of a kernel's parameters: one is ``__restrict__``, and one is written."""
    parameters = signatures(source)[name]
    return [
        (one, other)
        for one in parameters
        for other in parameters
        if one != other and one.is_restrict and (one.is_written or other.is_written)
    ]
