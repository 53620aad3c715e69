"""Links and combinators: pure state transitions that compose."""
