"""Specification strings: they identify codecs and schemes to other ranks and in saved states."""

from __future__ import annotations

from dataclasses import fields, is_dataclass


def spec_of(value: object) -> str:
    """Return the specification of a codec, a scheme or a part of one, with all of its options.

    For a dataclass: its ``spec_name`` and fields, as in ``TopK(density=0.01)``; for any other
    value: its ``repr``. Fingerprints of payloads and formats of saved states depend on it, so a
    class keeps its ``spec_name`` when it is renamed. A class whose fields have changed has a method
    ``spec_parts``, which returns the name and the fields that it had before.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    if own := getattr(value, "spec_parts", None):
        name, options = own()
    else:
        name = type(value).__dict__["spec_name"]  # an inherited one would name another class
        options = {field.name: getattr(value, field.name) for field in fields(value)}
    return f"{name}({', '.join(f'{key}={spec_of(part)}' for key, part in options.items())})"
