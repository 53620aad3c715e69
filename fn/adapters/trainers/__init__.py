"""The trainers that people use, with the communication of `fn`: transformers, accelerate and Lightning.

A trainer is imported when its adapter is used for the first time, not when this package is imported.
"""
