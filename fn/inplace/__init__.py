"""Steps that are written over the old state: found for a chain by its links, staged first, then committed.

Whatever is imported from here, the table of steps in place is full: ranks compare it, and those that had imported other
modules would refuse each other.
"""

import fn.inplace.adam
import fn.inplace.lamb
import fn.inplace.late
import fn.inplace.outer
import fn.inplace.sharded
import fn.inplace.zero_one_adam  # noqa: F401
