"""The cost of a method on a given network, before that is bought; `fn.tools.plan` shows it.

`traffic` counts what a step sends, as the ledger would; `network` turns messages into seconds; `predict` lets them
overlap with the backward pass and ranks the methods; `recommend` says which to take, from `evidence` of their losses.
"""
