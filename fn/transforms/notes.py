"""What an init has to say beside the state that it returns, for those who listen while it is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Note = TypeVar("Note")


class Notes(threading.local, Generic[Note]):
    """Notes of one kind, collected thread by thread; where nobody listens they are dropped."""

    _found: list[Note] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Note]]:
        """Collect what is said inside."""
        before, self._found = self._found, []
        try:
            yield self._found
        finally:
            self._found = before

    def say(self, note: Note) -> None:
        """Tell whoever listens."""
        if self._found is not None:
            self._found.append(note)
