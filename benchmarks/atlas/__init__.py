"""All methods on the same models, data, seeds and tokens: what each loses, and what it sends."""
