"""Check the line budget: ``make size``. Code lines only: no blanks, comments or docstrings.

Prints a table and every file or function over its limit; the exit status is 1 if there is one.
The limit of ``methods`` grows with the number of recipes, so a new one needs no change here.
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
FILE_LIMIT, FUNCTION_LIMIT = 400, 40


class Budget(NamedTuple):
    """Code lines of a part of the package: the aim, the limit until then, and what is to go."""

    aim: int
    limit: int
    to_go: str


CUDA = ("*.cu", "*.cuh")
TABLE = "recipes.py"
N_RECIPES = (PACKAGE / TABLE).read_text(encoding="utf-8").count(": Recipe(")
METHODS = 985 + 80 * (N_RECIPES - 30)  # what each new recipe may add
FOLDERS = {
    "methods": (TABLE, "codec/adaptive.py", "codec/methods/"),
    "adapters": ("adapter/", "torch/", "tensorflow/"),
    "torch_distributed": ("torch_distributed/",),
    "integrations": ("integrations/",),
    "tools": ("tools/", "cli/"),
}
BUDGETS = {
    "library": Budget(9_260, 13_217, "kernels of single tensors whose payloads vary in size"),
    "methods": Budget(METHODS, METHODS, "what methods do alike"),
    "adapters": Budget(1_900, 4_230, "what PyTorch's and TensorFlow's steps do alike"),
    "torch_distributed": Budget(700, 1_173, "what the drivers of DDP and of FSDP2 do alike"),
    "integrations": Budget(250, 166, "nothing"),
    "tools": Budget(2_700, 3_673, "not decided yet"),
    "CUDA": Budget(2_800, 2_778, "not decided yet"),
}

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
    """Number of code lines of a file or function."""

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
    """Yield the qualified name and the lines of every function, nested ones included."""
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
    paths = [path for suffix in CUDA for path in root.rglob(suffix)]
    texts = [_CUDA_COMMENT.sub("", path.read_text(encoding="utf-8")) for path in paths]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def part_of(size: Size) -> str:
    """Return the part of the package that a file belongs to."""
    return next((part for part, own in FOLDERS.items() if size.name.startswith(own)), "library")


def main() -> int:
    """Print the table; return the exit status."""
    file_sizes, function_sizes = measure_python(PACKAGE)
    lines = {part: 0 for part in BUDGETS} | {"CUDA": measure_cuda(PACKAGE)}
    for size in file_sizes:
        lines[part_of(size)] += size.lines
    print(f"{'code lines of':<18}{'now':>6}{'limit':>7}{'aim':>7}")
    over = []
    for part, budget in BUDGETS.items():
        to_go = f"  to go: {budget.to_go}" if lines[part] > budget.aim else ""
        print(f"{part:<18}{lines[part]:>6}{budget.limit:>7}{budget.aim:>7}{to_go}")
        if lines[part] > budget.limit:
            over.append(part)
    for title, sizes, limit in (
        ("largest file", file_sizes, FILE_LIMIT),
        ("longest function", function_sizes, FUNCTION_LIMIT),
    ):
        largest = max(sizes, default=Size(0, "-"))
        print(f"{title:<18}{largest.lines:>6}{limit:>7}{limit:>7}  {largest.name}")
        over += [f"{size.lines} {size.name}" for size in sorted(sizes) if size.lines > limit]
    if over:
        print(f"Over the limit: {'; '.join(over)}. Delete, or split by subject.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
