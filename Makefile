# `make demo` and `make test` need Python >= 3.10 with pip, and make. They keep what they install in .venv.

PYTHON ?= python3
RANKS  ?= 2
MINUTES ?= 1
OUT    ?= out

# What pip is asked for when there is no usable torch. Which build comes, for CPU or for CUDA, is decided by the
# package index that pip is configured with; options may be added:  make TORCH="torch==2.13.0 --index-url ..."
TORCH  ?= torch==2.13.0

BIN := .venv/bin
HAS_PYTHON := import sys; sys.exit(sys.version_info < (3, 10))
HAS_VENV := import ensurepip, venv
HAS_TORCH := import torch; v = torch.__version__.split("."); assert (2, 11) <= (int(v[0]), int(v[1])) < (2, 16)

.PHONY: help demo test lint notebooks figures docs dist reliability-test deepspeed-test trainers-test

help:
	@echo "make demo   train a small language model with AdamW and with 1-bit Adam on $(RANKS) ranks; results in $(OUT)/"
	@echo "make atlas  every method on the same model: loss against bytes, and against predicted time; $(OUT)/atlas.png"
	@echo "make test   ruff, mypy and all tests"
	@echo "make lint   ruff and mypy only"
	@echo "make report the lines of fn/, the words of the docs and the way of a step, as figures"
	@echo "make docs   the site, from docs/, the notebooks and the docstrings, in $(OUT)/site; warnings are errors"
	@echo "make notebooks   run the notebooks and keep their outputs; make figures: those of docs/, from the code"
	@echo "make dist   what would be uploaded, in dist/, tried in an environment of its own"
	@echo "make reliability-test   kills, damaged files, drift, long runs, notebooks, scripts; figures are in docs/reliability.md"
	@echo "make deepspeed-test   the drop-ins inside the current DeepSpeed, in an environment of their own"
	@echo "make trainers-test    transformers' Trainer, accelerate and Lightning with optimizers of fn, on two ranks"
	@echo "make torchft-test     islands with every fault once, and at random for $(MINUTES) minutes, in an environment of their own"
	@echo "make everything   all of these one after the other, whatever fails, with a table of them; about an hour"
	@echo "Variables:  PYTHON=$(PYTHON)  TORCH='$(TORCH)'  RANKS=$(RANKS)  OUT=$(OUT)  MINUTES=$(MINUTES)"

demo: .venv/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/train_lm.py --out $(OUT) --json $(OUT)/train_lm.json

# Every method in one picture. `benchmarks/atlas.py --full` tunes all of them, on three tasks.
.PHONY: atlas
atlas: .venv/.demo
	$(BIN)/python benchmarks/atlas.py --quick --out $(OUT)

# Every core runs tests, up to four: beside the processes that tests start themselves, more would wait for each other.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: pytest
test: .venv/.test
	@$(MAKE) --no-print-directory --jobs 2 lint pytest  # mypy takes one core for a while

pytest: .venv/.test
	$(PYTEST) -m "not reliability"

# Every exchange of every optimizer with a killed rank, kills during a save, long runs, notebooks, scripts of benchmarks,
# MPI, what is compiled: minutes, not seconds.
reliability-test: .venv/.test
	$(PYTEST) -m reliability $(MORE)

# What CI does not run shall not go red unseen: before a release, and behind every large change.
.PHONY: everything
everything: .venv/.test
	@OUT='$(OUT)' .ci/everything

.PHONY: report
report: .venv/.test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/house_report.py

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

notebooks: .venv/.test
	$(BIN)/python notebooks/execute.py

# As `make notebooks`, but their outputs stay as they are.
.PHONY: notebooks-test
notebooks-test: .venv/.test
	$(PYTEST) -m reliability tests/notebooks

figures: .venv/.test
	$(BIN)/python docs/concepts_figure.py

docs: .venv/.docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . $(OUT)/site
	@echo "open $(OUT)/site/index.html"

dist: .venv/.release
	OUT='$(OUT)' PYTHON='$(PYTHON)' TORCH='$(TORCH)' .ci/dist

# Downloads a second torch; DeepSpeed compiles a small extension at its first start, for which it needs a C++ compiler.
deepspeed-test: .venv-deepspeed/.done
	.venv-deepspeed/bin/python -c 'import torch; from importlib.metadata import version; \
		print("DeepSpeed", version("deepspeed"), "torch", torch.__version__)'
	DS_ACCELERATOR=cpu PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" \
		.venv-deepspeed/bin/python -m pytest -m deepspeed tests/integration

.venv-deepspeed/.done: pyproject.toml
	test -x .venv-deepspeed/bin/python || $(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip install $(TORCH)
	DS_BUILD_OPS=0 .venv-deepspeed/bin/python -m pip install deepspeed hypothesis pytest --editable .
	DS_ACCELERATOR=cpu PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" .venv-deepspeed/bin/python -c \
		'from deepspeed.comm.torch import build_shm_op; build_shm_op()'  # else ranks compile it, under a test's limit
	@touch $@

# The trainers come on top of the environment of the tests, and share its torch.
.PHONY: trainers-test
trainers-test: .venv/.test .venv/.trainers
	$(BIN)/python -m pytest tests/integration/test_trainers.py tests/adapters/trainers

# torchft brings its lighthouse along, and many packages that nothing else here needs.
.PHONY: torchft-test
torchft-test: .venv-torchft/.done
	OMP_NUM_THREADS=1 RUST_LOG=error ISLANDS_MINUTES=$(MINUTES) .venv-torchft/bin/python -m pytest -m torchft tests/adapters/test_torchft*.py

.venv-torchft/.done: pyproject.toml
	test -x .venv-torchft/bin/python || $(PYTHON) -m venv .venv-torchft
	.venv-torchft/bin/python -m pip install $(TORCH)
	.venv-torchft/bin/python -m pip install hypothesis pytest --editable '.[demo,torchft]'
	@touch $@

# Each stamp is as new as the pyproject.toml that was installed.
.venv/.%: pyproject.toml | .venv/.torch
	$(BIN)/python -m pip install --editable '.[$*]'
	@touch $@

# A torch that $(PYTHON) can already import is shared with the environment instead of being installed again.
.venv/.torch: pyproject.toml
	@$(PYTHON) -c '$(HAS_PYTHON)' || { echo "fn needs Python >= 3.10, but $(PYTHON) is missing or older; try make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c '$(HAS_VENV)' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages) .venv
	@$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	@touch $@
