"""Specifications: the text by which ranks and saved states tell codecs and schemes apart."""

from __future__ import annotations

from dataclasses import fields, is_dataclass


def spec_of(value: object) -> str:
    """Return the specification of a codec, a scheme or a part of one, with all of its options.

    A dataclass gives its ``spec_name`` and its fields, as in ``TopK(density=0.01)``; any other
    value its ``repr``. Fingerprints of payloads and formats of saved states are made from it, so a
    class that gets another name keeps its ``spec_name``.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    name = type(value).__dict__["spec_name"]  # an inherited one would be that of another class
    options = (f"{field.name}={spec_of(getattr(value, field.name))}" for field in fields(value))
    return f"{name}({', '.join(options)})"
