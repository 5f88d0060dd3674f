"""Leaves out of imports what transformers asks for and no worker uses: torch's compiler and DTensor.

Importing a model class of transformers 5.16 also imports `torch._dynamo`, `torch.distributed.tensor` and what these
import: 1.4 of 5.9 CPU-seconds, and 500 modules. Only processes that are ours do this, never the user's:

- The body of `torch._dynamo` runs at the first use of anything in it, but for four functions that torch and
  transformers call without compiling anything. Until then these do what its own do outside of a compiler. Where Triton
  is installed, which compiles for GPUs, nothing is put off: on a GPU parts of the compiler are imported first.
- transformers is told that there is neither `torch.distributed`, which ranks of the trainer use themselves, nor
  accelerate, which it would import.
- transformers reads all its 1,100 folders of models as it is imported, twice because its cache holds 128 folders: here
  the cache holds all of them, and each file is read from its `__all__` on. This saves a third of transformers' import.

Where a later version of either library needs more, more is imported, and nothing else changes.
"""

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
TRANSFORMERS = "transformers.utils.import_utils"


class _Deferred(ModuleType):
    """A module whose body runs when something else than its early functions is asked for. Submodules of a package that
    need nothing of it can be imported. `_allowed`: what `torch._dynamo.allow_in_graph` was given, for its table."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._turn = threading.RLock()
        self._allowed: list[Any] = []
        self.__dict__.update(EARLY, allow_in_graph=self._allow)

    def _allow(self, function: Any) -> Any:
        self._allowed.extend(function if isinstance(function, list | tuple) else [function])
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # The import system asks for these, and they are set where there are any.
            raise AttributeError(name)
        with self._turn:
            if isinstance(self, _Deferred):
                _run_body(self)
        return getattr(self, name)


def _run_body(module: _Deferred) -> None:
    allowed = module._allowed
    module.__class__ = ModuleType  # type: ignore[assignment]
    for name in (*EARLY, "allow_in_graph"):
        module.__dict__.pop(name, None)
    spec = module.__spec__
    assert spec is not None
    assert isinstance(spec.loader, _DeferredLoader)
    spec.loader.run_body(module)
    for function in allowed:
        module.allow_in_graph(function)


def _constant(function: Any) -> Any:
    function._dynamo_marked_constant = True
    return function


def _disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    return _disable if function is None else function


def _graph_break(*_: Any, **__: Any) -> None:
    """Does nothing, as torch's own function does outside of a compiled one."""


EARLY = {"assume_constant_result": _constant, "disable": _disable, "graph_break": _graph_break}
"""Functions of `torch._dynamo` that are called although nothing is compiled; `allow_in_graph` is one more."""


class _DeferredLoader(SourceFileLoader):
    """Makes the module without running its body."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing; `_Deferred.__getattr__` runs the body."""

    def run_body(self, module: ModuleType) -> None:
        super().exec_module(module)


class _TransformersLoader(SourceFileLoader):
    """Runs the module, then has it say that torch is not distributed."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names = module.__dict__
        names["is_torch_distributed_available"] = names["is_accelerate_available"] = _unavailable
        if scan := names.get("create_import_structure_from_path"):
            names["create_import_structure_from_path"] = functools.cache(scan.__wrapped__)
        if exported := names.get("fetch__all__"):
            names["fetch__all__"] = lambda text: exported(text[text.rfind("\n__all__") + 1 :])


def _unavailable(*_: Any) -> bool:
    """Answers as transformers does where a package is missing, or torch was built without `torch.distributed`."""
    return False


LOADERS: dict[str, type[SourceFileLoader]] = {COMPILER: _DeferredLoader, TRANSFORMERS: _TransformersLoader}


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        put_off = importlib.util.find_spec("triton") is None
        self._loaders = {name: loader for name, loader in LOADERS.items() if put_off or name != COMPILER}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self._loaders else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = self._loaders[name](spec.loader.name, spec.loader.path)
        return spec


def import_compiler() -> None:
    """Imports all of torch's compiler, for a library that uses it: its modules import each other, so that the body of
    the first one cannot run in the middle of an import of another."""
    importlib.import_module(COMPILER)
    module = sys.modules[COMPILER]
    if isinstance(module, _Deferred):
        _run_body(module)


def import_less() -> None:
    """Leaves these modules out of all imports of this process from now on; what is imported already stays."""
    sys.meta_path.insert(0, _Finder())
