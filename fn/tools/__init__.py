"""What a user runs: `python -m fn plan`, `python -m fn doctor`, `python -m fn log` and those that start islands.

`plan` shows what `fn.planner` predicts, as a table, as JSON or as a `page`; `calibrate` measures the links of a running
job and `probe` the steps of a script, in whose place `trials` takes those of other optimizers. `doctor` checks machines
and the way between them, and `islands` starts those of `fn.adapters.torchft`. `log` shows what `fn.adapters.follow` has
written.
"""
