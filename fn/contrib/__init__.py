"""Methods of one paper each, one a file: whoever needs one reads that file, and whoever breaks it may delete it.

A method has the name of its file; further links of it are found by the file's `__all__`. A file imports `fn` and
nobody imports it, so that nothing else notices where it is gone: names are found when they are used. docs/adding.md
says how a method is added. `fn.contrib.metrics` is no method, and is imported by its own name.

    >>> import fn
    >>> all(callable(getattr(fn.contrib, name)) for name in dir(fn.contrib))
    True
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any


def modules() -> list[ModuleType]:
    """Import and return the files of all methods."""
    names = [found.name for found in pkgutil.iter_modules(__path__)]
    return [import_module(f"{__name__}.{name}") for name in names if name.startswith("_")]


@cache
def _public() -> dict[str, Any]:
    """Return what the files list in `__all__`, by name."""
    return {name: getattr(module, name) for module in modules() for name in module.__all__}


def __getattr__(name: str) -> Any:
    """Return a public name of a method's file."""
    if name == "__all__":
        return __dir__()
    if not name.startswith("_") and name in _public():
        return _public()[name]
    raise AttributeError(f"fn.contrib has no {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    """Return the public names of all methods' files."""
    return sorted(_public())
