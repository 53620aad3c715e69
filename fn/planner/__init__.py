"""The cost of a method on a given network, before that is bought: `python -m fn plan`.

`traffic` counts what a step sends, as the ledger would; `network` turns messages into seconds; `predict` lets them
overlap with the backward pass and ranks the methods; `calibrate` measures a running job's links.
"""
