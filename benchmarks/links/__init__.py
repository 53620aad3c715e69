"""Steps and runs over links that are slow or far: real ones, throttled on one machine."""
