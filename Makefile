# Each command does its own set-up: `make demo` shows the library, `make check` is for every save, `make test` for all.
PYTHON ?= python3
# torch first and by its exact version, so that pip takes the small CPU build where there is one.
TORCH  ?= 2.13.0
N      ?= 2000
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-$(TORCH)
# Two runs of tests share the work, each with four ranks of its own: ranks mostly wait for each other, and leave room.
PARALLEL := -n 2 --dist worksteal --durations=15

# What the extra `zoo` names beside the networks that are there for tests, without its dependencies: see pyproject.toml.
ZOO := timm segmentation_models_pytorch kornia kornia_rs neuraloperator tensorly tensorly-torch opt_einsum zencfg \
       configmypy ruamel.yaml h5py einops

.PHONY: help demo check test lint unit docs fuzz conformance zoo hosts bench compat clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@rm -f $(VENV)/.ready-* && touch $@

demo: $(READY)  ## train a U-Net on one process and on 2 and 4 local ranks, and make demo/report.html
	$(BIN)/python -m convmesh demo

check: lint  ## for every save: lint, types, import contracts, and tests of every package and operator family
	$(BIN)/pytest $(PARALLEL) $$($(BIN)/python -m tests.tier)

test: lint docs unit  ## lint, types, import contracts, the site and all tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/pytest $(PARALLEL)

# Not --quiet, which keeps --strict from seeing warnings.
docs: $(READY)  ## the site, in site/; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(READY)  ## N=... random convolutions and programs against one process; prints the seed of a failure
	$(BIN)/python -m tests.fuzz --cases $(N) $(if $(KIND),--kind $(KIND)) $(if $(SEED),--seed $(SEED))
	$(if $(KIND)$(SEED),,$(BIN)/python -m tests.batching.compositions)

conformance: $(READY)  ## all of PyTorch's own operator samples, sharded along each dimension in turn; some on large meshes
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m tests.conformance --mesh 2x2x2 --most 3
	@for mesh in 4x4x4 1x8x8 64; do $(BIN)/python -m tests.conformance --mesh $$mesh --most 1 || exit 1; done

zoo: $(READY)  ## networks of seven packages on simulated ranks against one process, and docs/networks.md of them
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(ZOO)
	$(BIN)/python -m tests.zoo --page docs/networks.md

hosts: $(READY)  ## trainings on 2 and 4 hosts, made of namespaces, some of which are lost on the way; root on Linux
	$(BIN)/python -m tests.hosts

bench: $(READY)  ## the figures of docs/benchmarks.md, measured here
	$(BIN)/python -m benchmarks

compat:  ## the core tests with newer torch releases, each in an environment of its own (5 GB each)
	@for version in 2.14.1 2.15.0; do \
	  env=.compat/$$version; \
	  test -x $$env/bin/python || $(PYTHON) -m venv $$env || exit 1; \
	  $$env/bin/pip install --quiet --disable-pip-version-check torch==$$version || exit 1; \
	  $$env/bin/pip install --quiet --disable-pip-version-check --editable '.[core]' || exit 1; \
	  $$env/bin/python -m pytest $(PARALLEL) -m "not slow" || exit 1; \
	done

clean:  ## remove the environments
	rm -rf $(VENV) .compat
