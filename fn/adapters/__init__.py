"""The only modules that mutate: pure transforms behind stateful interfaces."""
