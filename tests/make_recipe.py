"""Write what follows from the table of recipes: ``make recipe``, after a change of a recipe.

Writes the stub of the factories, the golden files, the table of docs/recipes.md and, for a recipe
that has none, its rows in docs/architecture.md and in the table "Memory" of docs/methods.md. Prints
what is new or changed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from horovod_fftcomp.cli.recipes import ratio
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.tools.check import kernels
from tests import make_golden, make_stubs, reference
from tests.contracts import CODECS, HOST_ONLY
from tests.test_memory import peak

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECIPES_PAGE = DOCS / "recipes.md"
TABLE = re.compile(r"(<!-- recipes -->\n).*?(<!-- /recipes -->)", re.S)
NUMEL = 1_000_000
FILES, MEMORY = "A recipe's files", "Memory"
NONE = "\N{EN DASH}"


def payloads() -> str:
    """Return what the reference writes for some values, as ``check`` compares it, as JSON."""
    found = {}
    for name in RECIPES:
        if isinstance(scheme := get_scheme(name), Allgather):
            found[name] = kernels.payload_of(name, kernels=reference)
            if scheme.codec.transform != Identity():
                del found[name]["hash"]  # two transforms round differently
    return json.dumps(found, indent=1) + "\n"


def with_fresh_table(text: str) -> str:
    """Return the text of docs/recipes.md with the table between its markers replaced."""
    rows = [
        "| recipe | what is sent | options = defaults | collectives | ratio | source |",
        "|---|---|---|---|---:|---|",
    ]
    for name, recipe in RECIPES.items():
        options = ", ".join(f"`{option}={value}`" for option, value in recipe.own_options.items())
        cells = (
            f"`{name}`",
            recipe.summary,
            options or "none",
            ", ".join(get_scheme(name).rounds),
            f"{ratio(name, NUMEL):.1f}",
            recipe.source,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return TABLE.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], text)


def rows_of(text: str, title: str) -> dict[str, str]:
    """Return each recipe's row of the table below the heading ``title``."""
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return {
        name: row
        for row in re.findall(r"^\| `.+\|$", section, re.M)
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def with_rows(text: str, title: str) -> str:
    """Return a page's ``text`` with a row for each recipe that has none below ``title``."""
    before = ""
    for name in RECIPES:
        rows = rows_of(text, title)
        if name not in rows:
            rows[name] = files_row(name, rows) if title == FILES else memory_row(name)
            text = text.replace(before, f"{before}\n{rows[name]}", 1)
            print(f"new: {rows[name]}")
        before = rows[name]
    return text


def modules_of(part: object) -> list[str]:
    """Return the files of a dataclass and of those in its fields, within the package."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return []
    own = type(part).__module__.removeprefix("horovod_fftcomp.").replace(".", "/") + ".py"
    return [own, *(m for f in dataclasses.fields(part) for m in modules_of(getattr(part, f.name)))]


def files_row(name: str, rows: dict[str, str]) -> str:
    """Return a row with a recipe's files; the kernels are those of a recipe of the same files."""
    modules = modules_of(get_scheme(name))
    like = [row for other, row in rows.items() if modules_of(get_scheme(other)) == modules]
    kernels, cuda = like[0].split("|")[4:6] if like else (NONE, NONE)
    links = (_links(modules, folder) for folder in ("schemes/", "codec/"))
    cells = [f"`{name}`", *links, kernels.strip(), NONE if name in HOST_ONLY else cuda.strip()]
    return f"| {' | '.join(cells)} |"


def _links(modules: list[str], folder: str) -> str:
    own = [module for module in dict.fromkeys(modules) if module.startswith(folder)]
    links = (f"[{path.removeprefix(folder)}](../horovod_fftcomp/{path})" for path in own)
    return ", ".join(links) or NONE


def memory_row(name: str) -> str:
    """Return a row with the peak of memory, measured."""
    keeps = getattr(get_scheme(name), "error_feedback", False)
    what = "the residual and the new residual; the sum; the payloads"
    return f"| `{name}` | {what if keeps else 'the payloads; the sum'} | {peak(name):.2f} |"


def write(path: Path, text: str) -> None:
    """Write ``text`` if it is new, and say so."""
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"changed: {path}")


def write_golden() -> None:
    """Write new and changed golden payloads, and remove those of no codec."""
    for name in CODECS:
        path, made = make_golden.FOLDER / f"{name}.npz", make_golden.make(name)
        if path.exists():
            with np.load(path) as old:
                if all(old[key].tobytes() == array.tobytes() for key, array in made.items()):
                    continue
            print("The wire format is another one now: see CONTRIBUTING.md, House rules, Bytes.")
        print(f"{'changed' if path.exists() else 'new'}: {path}")
        np.savez_compressed(path, **made)
    for path in make_golden.FOLDER.glob("*.npz"):
        if path.stem not in CODECS:
            path.unlink()
            print(f"removed: {path}")


if __name__ == "__main__":
    write(make_stubs.PATH, make_stubs.stub())
    write(make_golden.SPECS, "\n".join(make_golden.specifications()) + "\n")
    write_golden()
    write(kernels.PAYLOADS, payloads())
    write(RECIPES_PAGE, with_fresh_table(RECIPES_PAGE.read_text("utf-8")))
    for page, title in (("architecture.md", FILES), ("methods.md", MEMORY)):
        write(DOCS / page, with_rows((DOCS / page).read_text("utf-8"), title))
