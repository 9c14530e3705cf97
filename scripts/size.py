"""Check the line budget: ``make size``. Code lines only: no blanks, comments or docstrings.

Prints a table and every file or function over its limit; the exit status is 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "horovod_fftcomp"
PYTHON_LIMIT, FILE_LIMIT, FUNCTION_LIMIT, CUDA_LIMIT = 19_000, 400, 40, 2700

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


class Size(NamedTuple):
    """How many code lines something has."""

    lines: int
    name: str


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code; ``tree``: the parsed ``source``."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, range]]:
    """Yield the qualified name and the lines of every function, those inside others too."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}{node.name}."
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name[:-1], range(node.lineno, (node.end_lineno or node.lineno) + 1)
        yield from functions(node, name)


def measure_python(root: Path) -> tuple[list[Size], list[Size]]:
    """Return the sizes of all Python files below ``root`` and of all their functions."""
    file_sizes, function_sizes = [], []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, str(path))
        lines, name = code_lines(source, tree), path.relative_to(root).as_posix()
        file_sizes.append(Size(len(lines), name))
        for function, span in functions(tree):
            function_sizes.append(Size(len(lines.intersection(span)), f"{name}: {function}"))
    return file_sizes, function_sizes


def measure_cuda(root: Path) -> int:
    """Return the code lines of all CUDA files below ``root``."""
    paths = [path for suffix in ("*.cu", "*.cuh") for path in root.rglob(suffix)]
    texts = [_CUDA_COMMENT.sub("", path.read_text(encoding="utf-8")) for path in paths]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def main() -> int:
    """Print the table; return the exit status."""
    file_sizes, function_sizes = measure_python(PACKAGE)
    none = Size(0, "-")
    rows = [
        ("Python", Size(sum(size.lines for size in file_sizes), "all files"), PYTHON_LIMIT),
        ("largest file", max(file_sizes, default=none), FILE_LIMIT),
        ("longest function", max(function_sizes, default=none), FUNCTION_LIMIT),
        ("CUDA", Size(measure_cuda(PACKAGE), "all files"), CUDA_LIMIT),
    ]
    print(f"{'code lines of':<18}{'now':>6}{'limit':>7}")
    for title, size, limit in rows:
        print(f"{title:<18}{size.lines:>6}{limit:>7}  {size.name}")
    over = [f"{title} ({size.name})" for title, size, limit in rows if size.lines > limit]
    for sizes, limit in ((file_sizes, FILE_LIMIT), (function_sizes, FUNCTION_LIMIT)):
        for size in sorted(sizes, reverse=True):
            if size.lines > limit:
                print(f"over {limit}: {size.lines} {size.name}")
    if over:
        print(f"Over budget: {'; '.join(over)}. Delete, or split by subject.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
