"""Hook of MkDocs (``make docs``): pages and files from outside of ``docs/``, and links to them.

In a repository's browser the documentation is read where it lies. In the site, README.md is the
start page, other Markdown files become pages, and everything else that a page links to is copied.
Cells of tables get the name of their column, which narrow screens show beside them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "performance.md",
    "benchmarks/results/bench.md": "results/bench.md",
    "benchmarks/results/cluster.md": "results/cluster.md",
    "benchmarks/results/convergence.md": "results/convergence.md",
    "benchmarks/results/defaults.md": "results/defaults.md",
    "benchmarks/results/forecast.md": "results/forecast.md",
    "benchmarks/results/ranks.md": "results/ranks.md",
    "benchmarks/results/steps.md": "results/steps.md",
    "docker/README.md": "docker.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.M)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
VERSION = re.compile(r'^__version__ = "(.+)"', re.M)
TABLE = re.compile(r"<table>.*?</table>", re.S)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
ROW = re.compile(r"<tr>\s*<td.*?</tr>", re.S)


def path_in_site(source: str) -> str:
    """Return where a file of the repository lies in the site; Python files become text."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"files/{source}" + (".txt" if source.endswith(".py") else "")


def linked(source: str, text: str) -> list[str]:
    """Return the files of the repository that a page links to."""
    folder = posixpath.dirname(source)
    paths = [posixpath.normpath(posixpath.join(folder, path)) for _, path in LINK.findall(text)]
    return [path for path in paths if (ROOT / path).is_file()]


def on_config(config: Any) -> None:
    """Put the version into the name of the site, which its header and titles show."""
    text = (ROOT / "horovod_fftcomp" / "wire" / "version.py").read_text(encoding="utf-8")
    found = VERSION.search(text)
    assert found is not None
    config.site_name += f" {found[1]}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files from outside of ``docs/``."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for source in [*pages, *PAGES]:
        for path in [source, *linked(source, (ROOT / source).read_text(encoding="utf-8"))]:
            uri = path_in_site(path)
            if not path.startswith("docs/") and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that point out of ``docs/``, or into it."""
    uri = page.file.src_uri
    source = SOURCES.get(uri, f"docs/{uri}")
    here, folder = posixpath.dirname(uri), posixpath.dirname(source)

    def rewritten(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if not (ROOT / path).is_file():
            return found[0]
        return found[1] + posixpath.relpath(path_in_site(path), here or ".")

    return LINK.sub(rewritten, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Name each cell's column, but the first one's, which names the row."""
    return TABLE.sub(lambda table: _labelled(table[0]), content)


def _labelled(table: str) -> str:
    names = [re.sub(r"<.*?>", "", heading).strip() for heading in HEADING.findall(table)]

    def row(found: re.Match[str]) -> str:
        columns = iter(names)

        def cell(_: re.Match[str]) -> str:
            name = next(columns, "")
            return "<td" if name in ("", names[0]) else f'<td data-column="{name}"'

        return re.sub("<td", cell, found[0])

    return ROW.sub(row, table)


class Docstrings(griffe.Extension):
    """Show the examples of docstrings as code, and of factories the options of their recipe."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around the examples of a docstring, and leave out the options of recipes.

        These stand beside the factories, in the words of each recipe.
        """
        if obj.docstring is not None:
            text = obj.docstring.value.split("\n\nOther Parameters\n")[0]
            text = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = text.replace("  # doctest: +SKIP", "")

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Leave out the settings, which all factories take; ``none`` takes nothing else."""
        factories = pkg["adapter.signatures.Compression"].functions
        settings = {each.name for each in factories["none"].parameters} - {"model"}
        kind = griffe.ParameterKind.var_keyword
        for name, factory in factories.items():
            if name not in ("none", "parse"):
                own = [each for each in factory.parameters if each.name not in settings]
                more = griffe.Parameter("settings", annotation="Any", kind=kind)
                factory.parameters = griffe.Parameters(*own, more)
