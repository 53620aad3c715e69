"""Steps, kernels and small runs on two ranks or one thread, without a link."""
