"""Import hook of ``run``: adds ``compression=`` to the optimizers and tapes of Horovod.

``Wrapping`` replaces Horovod's wrapper functions when the script imports a module of Horovod, and
the constructor of DDP when it imports PyTorch. It imports no framework itself; the adapter is
imported when the script calls a wrapper.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from horovod_fftcomp.errors import UnsupportedError

# Module of Horovod -> our adapter, and the functions of the module that take compression=.
_KERAS = ("tensorflow", ("DistributedOptimizer", "PartialDistributedOptimizer", "load_model"))
WRAPPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "horovod.torch": ("torch", ("DistributedOptimizer",)),
    "horovod.tensorflow": (
        "tensorflow",
        ("DistributedOptimizer", "DistributedGradientTape", "PartialDistributedGradientTape"),
    ),
    "horovod.tensorflow.keras": _KERAS,
    "horovod.keras": _KERAS,
    "torch.nn.parallel.distributed": ("torch_distributed", ("DistributedDataParallel",)),
}


class Wrapping:
    """Gives a compressor of one recipe to each optimizer, tape and DDP model of a script.

    ``options``: options of the recipe and settings of ``Compression``. ``made`` is called with each
    new compressor. All tapes of a process share one compressor, since a loop makes a tape for each
    step. A call that cannot be wrapped raises UnsupportedError.
    """

    def __init__(
        self, recipe: str, options: Mapping[str, Any], made: Callable[[Any], None]
    ) -> None:
        self._recipe = recipe
        self._options = dict(options)
        self.made = made
        self._of_tapes: Any = None
        self._ours: list[Any] = []  # the compressors made so far

    def install(self) -> None:
        """Replace the functions of modules that are imported already, and of others on import."""
        sys.meta_path.insert(0, _Finder(self._replace))
        for name in WRAPPERS:
            if name in sys.modules:
                self._replace(sys.modules[name])

    def _replace(self, module: ModuleType) -> None:
        adapter, names = WRAPPERS[module.__name__]
        if adapter == "torch_distributed":
            self._wrap_ddp(module.DistributedDataParallel)
            return
        for name in names:
            if hasattr(module, name):
                setattr(module, name, self._wrapped(module, name, adapter))
        if adapter == "tensorflow":
            _mend_callbacks(module)

    def _wrap_ddp(self, model_type: Any) -> None:
        """Compress the gradients of all models of a class, and of its subclasses."""
        plain = model_type.__init__

        @functools.wraps(plain)
        def with_compression(model: Any, *args: Any, **kwargs: Any) -> None:
            adapter = importlib.import_module("horovod_fftcomp.torch_distributed")
            construct = functools.partial(plain, model, *args, **kwargs)
            if kwargs.get("init_sync", True):  # all ranks meet
                rounds = importlib.import_module("horovod_fftcomp.torch_distributed.rounds")
                rounds.construct_under_run(construct, model)
            else:
                construct()
            self.made(adapter.compress(model, self._recipe, **self._options))
            model.register_comm_hook = _refuse_hook

        model_type.__init__ = with_compression

    def _wrapped(self, module: ModuleType, name: str, adapter: str) -> Callable[..., Any]:
        plain = getattr(module, name)
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def with_compression(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments.get("compression")
            if any(given is one for one in self._ours):
                return plain(*args, **kwargs)  # called by another wrapped function
            _check(f"hvd.{name}", bound.arguments, module)
            bound.arguments["compression"] = self._compressor(adapter, name, bound.arguments)
            return plain(*bound.args, **bound.kwargs)

        return with_compression

    def _compressor(self, adapter: str, name: str, arguments: dict[str, Any]) -> Any:
        is_tape = name.endswith("GradientTape")
        if is_tape and self._of_tapes is not None:
            return self._of_tapes
        # Without a model it binds to the variables that are exchanged first, so not to local ones.
        model, options = None, dict(self._options)
        if adapter == "torch":
            named = arguments.get("named_parameters")
            if named is None:  # the names that Horovod gives
                named = (
                    (f"allreduce.noname.{i}.{j}", parameter)
                    for i, group in enumerate(arguments["optimizer"].param_groups)
                    for j, parameter in enumerate(group["params"])
                )
            model = arguments["named_parameters"] = list(named)  # Horovod needs it too
        if arguments.get("process_set") is not None:
            options["process_set"] = arguments["process_set"]
        factories = importlib.import_module(f"horovod_fftcomp.{adapter}").Compression
        compressor = getattr(factories, self._recipe)(model, **options)
        if is_tape:
            self._of_tapes = compressor
        self._ours.append(compressor)
        self.made(compressor)
        return compressor


installed: list[Wrapping] = []


def install(recipe: str, options: Mapping[str, Any], made: Callable[[Any], None]) -> None:
    """Install a ``Wrapping``; one that a parent process has installed is used, with ``made``."""
    if installed:
        installed[0].made = made
        return
    installed.append(Wrapping(recipe, options, made))
    installed[0].install()


def _check(name: str, arguments: Mapping[str, Any], module: ModuleType) -> None:
    """Raise UnsupportedError if a call must not get a compressor without an edit of the script."""
    given = arguments.get("compression")
    if given is not None and given is not module.Compression.none:
        raise UnsupportedError(
            f"the script passes {name} a compression= of its own ({_described(given)}): remove it "
            "from the script, or run the script without `horovod-fftcomp run`"
        )
    if arguments.get("op") is not None and arguments["op"] is getattr(module, "Adasum", None):
        raise UnsupportedError(
            f"{name}(op=hvd.Adasum) cannot be compressed; use op=hvd.Average or op=hvd.Sum"
        )
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UnsupportedError(
            "an elastic job has to keep the residuals in its state: pass compression= to the "
            "optimizer and the state in the script, and run it without `horovod-fftcomp run`"
        )


def _refuse_hook(state: object, hook: Callable[..., Any]) -> None:
    del state
    raise UnsupportedError(
        f"the script registers a communication hook with DDP ({hook.__qualname__}), of which a "
        "model has one at most: remove it from the script, or run the script without "
        "`horovod-fftcomp run`"
    )


def _mend_callbacks(module: ModuleType) -> None:
    """Make Horovod's callbacks use the backend of ``tf.keras``.

    They use that of the package ``keras``, which in Keras 3 lacks functions that they call.
    """
    callbacks = getattr(module, "callbacks", None)
    if callbacks is not None and not hasattr(callbacks.K, "constant"):
        callbacks.K = callbacks.tf.keras.backend


def _described(compression: Any) -> str:
    kind = compression if isinstance(compression, type) else type(compression)
    return f"{kind.__module__}.{kind.__qualname__}"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Horovod's modules by the other finders; calls ``loaded`` when one is loaded."""

    def __init__(self, loaded: Callable[[ModuleType], None]) -> None:
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of Horovod's modules; None for all others."""
        if fullname not in WRAPPERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self._loaded(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
