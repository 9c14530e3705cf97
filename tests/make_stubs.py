"""Write the stubs of the factories: ``make stubs``. Editors and type checkers read them.

``compression.pyi`` stands in the place of ``compression.py`` for them: one static method for each
recipe, with what ``inspect.signature`` shows at run time.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import horovod_fftcomp
from horovod_fftcomp.adapter.factories import declaration, keywords_of
from horovod_fftcomp.engine.policy import Rule
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schedules import Schedule

PACKAGE = Path(horovod_fftcomp.__file__).parent
HEADS = {
    "torch": '''"""Signatures of the factories; ``make stubs`` writes this file."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from horovod_fftcomp import Recover
from horovod_fftcomp.adapter.torch_tensors.parameters import Model
from horovod_fftcomp.schedules import Schedule
from horovod_fftcomp.torch.compressor import TorchCompressor
''',
    "tensorflow": '''"""Signatures of the factories; ``make stubs`` writes this file."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol

from horovod_fftcomp import Recover
from horovod_fftcomp.schedules import Schedule
from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor

class _Model(Protocol):
    """A Keras model or layer, or a ``tf.Module``."""

    @property
    def trainable_variables(self) -> Any: ...
''',
}
MODELS = {"torch": "model: Model", "tensorflow": "model: _Model | Iterable[Any] | None = None"}
# A list of unlike rules in a variable is one of (object, object) to a type checker.
SHOWN = {"Schedule": Schedule, "tuple[Any, Any]": Rule}
MADE = {"torch": "TorchCompressor", "tensorflow": "TensorFlowCompressor"}


def stub(framework: str) -> str:
    """Return the stub of one framework's ``Compression``, as the table of recipes has it today."""
    summary = (
        '    """Factories of compressors, such as ``Compression.fft(model, density=0.15)``."""'
    )
    lines = [HEADS[framework], "class Compression:", summary]
    for name, recipe in RECIPES.items():
        declared = [MODELS[framework], "*", *map(_declared, keywords_of(name))]
        lines += ["", "    @staticmethod", f"    def {name}("]
        lines += [f"        {each}," for each in declared]
        lines += [f"    ) -> {MADE[framework]}:"]
        lines += [f'        """Return a compressor: {recipe.summary}."""']
    lines += ["", "    @staticmethod", "    def parse("]
    lines += [f"        {each}," for each in ("text: str", MODELS[framework], "**options: Any")]
    lines += [f"    ) -> {MADE[framework]}:"]
    lines += ['        """Return a compressor, written as ``"fft:density=0.1"``."""']
    return "\n".join(lines) + "\n"


def _declared(parameter: inspect.Parameter) -> str:
    text = declaration(parameter)
    for name, alias in SHOWN.items():
        text = text.replace(_written(alias), name)
    return text.replace("'", '"')


def _written(alias: object) -> str:
    parameter = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, annotation=alias)
    return declaration(parameter).removeprefix("_: ")


def path_of(framework: str) -> Path:
    """Return where the stub of one framework stands."""
    return PACKAGE / framework / "compression.pyi"


if __name__ == "__main__":
    for framework in HEADS:
        path_of(framework).write_text(stub(framework), encoding="utf-8")
