"""The proof on a GPU: checks, each against a limit that was set before it ran."""
