"""Translates PTX, which the CUDA compiler makes of kernels, to C++ that the emulator runs.

It reads the syntax alone: each instruction becomes a call of a function that ptx_instructions.h
defines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_COMMENT = re.compile(r"//[^\n]*")
_ENTRY = re.compile(
    r"\.(?:visible|weak) \.entry (\w+)\(([^)]*)\)\s*"
    r"(?:\.(?:maxntid|minnctapersm)[^\n]*\s*)*\{\n(.*?)\n\}\n",
    re.S,
)
# What may stand outside of kernels; kernels that used such constants would not compile.
_OUTSIDE = re.compile(
    r"\.(?:version|target|address_size)[^\n]*|\.global [^;{}]*;"
    r"|\.extern \.shared \.align 16 \.b8 memory\[\];|\s+"
)
_PARAMETER = re.compile(r"\s*\.param \.[ubf](32|64) (?:\.ptr \.align \d+ )?(\w+)\s*")
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|\$(?P<label>\w+):|(?P<text>[^;]+);)\s*")
_REGISTERS = re.compile(r"\.reg \.([a-z])(\d*|red)\s+%(\w+?)(?:<(\d+)>)?")
_INSTRUCTION = re.compile(r"(?:@(!?)%(p\d+)\s+)?([a-z][a-z0-9_.]*)(?:\s+(.*))?", re.S)
_OPERANDS = re.compile(r"\s*(\{[^{}]*\}|\[[^\[\]]*\]|[^\s,\[\]{}]+)\s*(?:,|$)")
_NUMBER = re.compile(r"-?\d+")
_FLOAT = re.compile(r"0[fd]([0-9A-F]+)")
_NAME = re.compile(r"%?([A-Za-z_][\w.]*)")
# The emulator runs one thread at a time, each of which sees all that was written before. Addresses
# of global memory are also generic ones.
_WITHOUT_EFFECT = {"global", "nc", "volatile", "relaxed", "gpu"}


class PtxError(Exception):
    """PTX that the translator does not know."""


def to_cpp(ptx: str, names: Collection[str]) -> str:
    """Return C++ functions that do what these kernels of a module do, and have their names."""
    ptx = _COMMENT.sub("", ptx)
    outside = _OUTSIDE.sub("", _ENTRY.sub("", ptx))
    if outside:
        raise PtxError(f"outside of kernels: {outside[:200]!r}")
    kernels = [_kernel(*found.groups()) for found in _ENTRY.finditer(ptx) if found[1] in names]
    assert len(kernels) == len(names)
    return "\n".join(['#include "ptx_instructions.h"\n', *kernels])


def _kernel(name: str, parameters: str, body: str) -> str:
    declared = []
    for text in parameters.split(",") if parameters.strip() else []:
        declared.append("u{} {}".format(*_match(_PARAMETER, text, "parameter").groups()))
    lines = [_statement(found) for found in _statements(body)]
    return f"__global__ void {name}({', '.join(declared)}) {{\n" + "\n".join(lines) + "\n}\n"


def _match(pattern: re.Pattern[str], text: str, what: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise PtxError(f"{what}: {text.strip()!r}")
    return found


def _statements(body: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(body):
        found = _STATEMENT.match(body, at)
        if found is None:
            raise PtxError(f"statement: {body[at : at + 100]!r}")
        yield found
        at = found.end()


def _statement(found: re.Match[str]) -> str:
    if found["brace"]:
        return found["brace"]
    if found["label"]:
        return f"{found['label']}:;"
    text = found["text"]
    if text.startswith(".pragma"):
        return ""
    return _declaration(text) if text.startswith(".") else _instruction(text)


def _declaration(text: str) -> str:
    kind, width, name, count = _match(_REGISTERS, text, "declaration").groups()
    names = [f"{name}{i}" for i in range(int(count))] if count else [name]
    held = "bool" if kind == "p" else f"u{width}"
    # Registers begin with any contents.
    return f"{held} {', '.join(names)}; {' = '.join(names)} = {held}(0xABABABABABABABAB);"


def _instruction(text: str) -> str:
    negated, guard, opcode, rest = _match(_INSTRUCTION, text, "instruction").groups()
    condition = f"if ({negated}{guard}) " if guard else ""
    if opcode in ("bra", "bra.uni"):
        return f"{condition}goto {rest.removeprefix('$')};"
    if opcode == "ret":
        return f"{condition}return;"
    operands = _split(rest or "")
    parts = opcode.split(".")
    if parts[0] in ("ld", "st", "atom"):
        parts = [part for part in parts if part not in _WITHOUT_EFFECT]
    if parts[0] == "mov" and "{" in rest:
        parts.append("to_parts" if operands[0].startswith("{") else "of_parts")
    return f"{condition}ptx_{'_'.join(parts)}({', '.join(map(_operand, operands))});"


def _split(text: str) -> list[str]:
    operands, at = [], 0
    while at < len(text):
        found = _OPERANDS.match(text, at)
        if found is None:
            raise PtxError(f"operands: {text!r}")
        operands.append(found[1])
        at = found.end()
    return operands


def _operand(text: str) -> str:
    if text.startswith("{"):
        return ", ".join(map(_operand, _split(text[1:-1])))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return f"u64({_operand(base)}) + ({offset or 0})"
    if "|" in text:
        return ", ".join(map(_operand, text.split("|")))
    if text == "_":
        return "ignored"
    if _NUMBER.fullmatch(text):
        return text
    if found := _FLOAT.fullmatch(text):
        return f"0x{found[1]}u"
    return _match(_NAME, text, "operand")[1].replace(".", "_")
