"""Steps that are written over the old state: found for a chain by its links, staged first, then committed.

Whatever is imported from here, the table of steps in place is full: ranks compare it, and those that had imported other
modules would refuse each other.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
