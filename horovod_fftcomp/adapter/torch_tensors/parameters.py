"""Parameters of a compressor's model: their names, shapes and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Tensor

Model: TypeAlias = torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


class Parameters:
    """Names and trainable parameters of a model, in an order that is equal on all ranks.

    ``model``: a module, named parameters or a list of parameters. Raises ValueError if none is
    trainable or names are not unique, TypeError for anything else than parameters and
    UnsupportedError for parameters that are not floating point.
    """

    def __init__(self, model: Model | None) -> None:
        if model is None:
            raise TypeError(
                "model is missing: Compression.<recipe>(model) takes the model whose gradients the "
                "optimizer exchanges, its named_parameters() or a list of parameters"
            )
        if not isinstance(model, Iterable | torch.nn.Module):
            raise TypeError(
                "model must be a torch.nn.Module, its named_parameters() or a list of parameters, "
                f"got a {type(model).__name__} of {type(model).__module__}; "
                "for a Keras model use Compression of horovod_fftcomp.tensorflow"
            )
        items: list[tuple[str, torch.Tensor] | torch.Tensor] = list(
            model.named_parameters() if isinstance(model, torch.nn.Module) else model
        )
        pairs = [
            (plain_name(item[0]), item[1]) if isinstance(item, tuple) else (f"{i}", item)
            for i, item in enumerate(items)
        ]
        _check(pairs)
        trainable = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        if not trainable:
            raise ValueError(
                "model has no trainable parameters; pass the model whose gradients the optimizer "
                "exchanges, its named_parameters() or a list of parameters"
            )
        self.names = [name for name, _ in trainable]
        self.tensors = [parameter for _, parameter in trainable]
        self.frozen = [pair for pair in pairs if not pair[1].requires_grad]

    def specs(self) -> list[Tensor]:
        """Return names and shapes of the trainable parameters."""
        return [
            Tensor(name, tuple(parameter.shape))
            for name, parameter in zip(self.names, self.tensors, strict=True)
        ]


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def with_plain_names(saved: Any) -> Any:
    """Return a saved state, single or gathered, with ``plain_name`` applied to its keys."""
    if isinstance(saved, dict):
        return {plain_name(key): with_plain_names(value) for key, value in saved.items()}
    return [*map(with_plain_names, saved)] if isinstance(saved, list) else saved


def _check(pairs: list[tuple[str, Any]]) -> None:
    """Raise TypeError, ValueError or UnsupportedError for wrong types, names or dtypes."""
    for name, parameter in pairs:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"model: {name!r} is a {type(parameter).__name__}, not a parameter; pass the "
                "model, its named_parameters() or a list of parameters"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UnsupportedError(
                f"parameter {name!r} is {parameter.dtype}; supported are gradients of float16, "
                "bfloat16, float32 and float64"
            )
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"names of parameters must be unique, but these come twice: {', '.join(twice[:8])}; of "
            "several models prefix them: [(f'g.{n}', p) for n, p in g.named_parameters()]"
        )
