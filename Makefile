# Thin: every target is one or two commands. `make demo` and `make test` install what they need (Debian 12 or 13, root).
# The text after ## next to a target is its line in `make help`.
VENV := .venv
PYTHON := $(VENV)/bin/python
PREFIX ?= /opt/sluice
PYTHON3 ?= $(firstword $(wildcard /usr/bin/python3) python3)
VERSION_HEADER := native/include/sluice/version.h
export CMAKE_GENERATOR := Ninja
# Of what is compiled, tests in C and benchmarks are two fifths, which `make demo` alone does not need.
C_TESTS := $(if $(filter-out demo,$(MAKECMDGOALS)),ON,OFF)

.PHONY: help build install-packages cluster-packages test-packages suite-packages docs-packages demo test test-trixie test-sid test-machines \
	test-gpu lint check native-test fuzz bench soak references screenshots docs format install dist deb clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- what is needed ----
$(VENV)/.installed: pyproject.toml $(VERSION_HEADER) tools/debian-packages.txt tools/engine.lock tools/providers.lock
	tools/install-packages build
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(VENV)/bin/pip install -q scikit-build-core "cffi>=1.16" setuptools
	$(VENV)/bin/pip uninstall -q -y sluice # the name until 0.1.0
	$(VENV)/bin/pip install -q --require-hashes -r tools/engine.lock -r tools/providers.lock
	$(VENV)/bin/pip install -q --no-build-isolation -e ".[dev]"
	touch $@ $(VENV)/.linters

# An editable install compiles nothing, so this needs only Python.
$(VENV)/.linters: pyproject.toml $(VERSION_HEADER)
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(VENV)/bin/pip install -q -e ".[lint]"
	touch $@

build: $(VENV)/.installed ## .venv, and all C code except the plugins (`sluice plugin build`)
	cmake -S . -B build/editable -DCMAKE_BUILD_TYPE=Release -DSLUICE_TESTS=$(C_TESTS) -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) >/dev/null
	cmake --build build/editable

install-packages: ## Debian packages that `make install` needs; no daemon is among them
	tools/install-packages build plugins
cluster-packages: ## Debian packages for a cluster on this machine: Slurm, MUNGE, MariaDB
	tools/install-packages build cluster
test-packages: ## Debian packages for all tests
	tools/install-packages build cluster test
suite-packages: ## Debian packages for Slurm's own test suite
	tools/install-packages suite
docs-packages: ## Debian packages that the documentation site needs
	tools/install-packages build docs

# What browser tests take from npm, pinned by tests/web/package-lock.json.
WEB_TESTS := build/web-tests
$(WEB_TESTS)/.installed: tests/web/package.json tests/web/package-lock.json | test-packages
	mkdir -p $(WEB_TESTS)
	cp tests/web/package.json tests/web/package-lock.json $(WEB_TESTS)
	cd $(WEB_TESTS) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# ---- targets ----
demo: cluster-packages build ## a Slurm cluster on this machine that shows Sluice; KEEP=1 keeps its page up
	$(PYTHON) -m dev_cluster.demo $(if $(KEEP),--keep)

# Three modules of tests of daemons at a time, which wait most of the time, and one of the others next to them, then a fourth.
test: test-packages build $(WEB_TESTS)/.installed ## all tests
	SLUICE_BROWSER=require tools/run-tests $(PYTHON)

test-trixie: test-packages build ## the tests of Slurm 24.11, in a Debian 13 chroot
	SLUICE_TRIXIE=require $(PYTHON) -m pytest tests -m trixie

test-sid: test-packages build ## the tests of Slurm 26.05, in a tree of Debian sid
	SLUICE_SID=require $(PYTHON) -m pytest tests -m sid

test-gpu: build ## the tests marked gpu on an NVIDIA GPU, 10 minutes, and a report in build/; needs root and no Slurm
	$(PYTHON) tools/gpu_report.py

# A virtual machine under QEMU, of packages that it builds.
test-machines: test-packages build ## the tests in a virtual machine, under QEMU
	tools/install-packages virtual plugins deb
	SLUICE_TEST_SCALE=full $(PYTHON) -m pytest tests/integration/test_machines.py tests/integration/test_soft_roce.py tests/integration/test_fleet_guest.py --timeout 7200

lint: $(VENV)/.linters ## linters, types, format and layers; needs Python and no other package
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	tools/clang-format --check
	$(VENV)/bin/lint-imports --no-cache
	$(PYTHON) tools/loaded_by_name.py
	$(PYTHON) tools/include-layers

check: build lint docs ## `make lint`, dead links, and whether what is generated is what the code says
	$(PYTHON) tools/policy_reference.py --check
	$(PYTHON) tools/openapi_reference.py --check
	$(PYTHON) tools/client_reference.py --check
	$(PYTHON) tools/grpc_reference.py --check

native-test: build ## the tests in C, under sanitizers
	tools/native-test

fuzz: build ## the fuzz targets in C, SECONDS_EACH=10
	tools/fuzz

# TRACES=DIR: the folder of public traces that docs/benchmarks.md describes; without it only benchmarks that need none.
# NAMES="probe group": only these. All of it takes about four hours.
# BASE=COMMIT NAMES="...": those of both trees in turns, and the ratio of each figure; RUNS=3 of each tree, BOUND=1.10.
bench: cluster-packages build ## the benchmarks, or those in NAMES="..."; TRACES=DIR; BASE=COMMIT compares with it
	$(if $(BASE),$(PYTHON) -m benchmarks.compare $(BASE),tools/bench "$(TRACES)") $(NAMES)

ifdef DURATION
soak: cluster-packages build ## all tests with full counts: hours; DURATION=72h: one cluster under load, and what leaks
	$(PYTHON) -m benchmarks.soak $(DURATION)
else
soak: test-packages suite-packages build $(WEB_TESTS)/.installed
	tools/install-packages virtual plugins deb
	SLUICE_TEST_SCALE=full $(PYTHON) -m pytest tests --timeout 7200
	$(PYTHON) tools/slurm-suite stock --json build/suite-stock.json
	$(PYTHON) tools/slurm-suite place --compare build/suite-stock.json
endif

screenshots: test-packages build ## the page's views, in build/screenshots, and the pictures of the docs
	$(PYTHON) -m tests.web.screenshots $(VIEWS)

docs: docs-packages $(VENV)/.installed ## the site, in build/site; a dead link or anchor fails it
	$(VENV)/bin/mkdocs build

references: build ## write what is generated again: sluice.yaml(5), the REST API's description and client, the gRPC service
	$(PYTHON) tools/policy_reference.py
	$(PYTHON) tools/openapi_reference.py
	$(PYTHON) tools/client_reference.py
	$(PYTHON) tools/grpc_reference.py

format: $(VENV)/.linters ## format all files as `make lint` requires
	$(VENV)/bin/ruff check --fix-only -q .
	$(VENV)/bin/ruff format -q .
	tools/clang-format

# As root: pip takes no file whose hash is not in the lock files (tools/lock), and no package builds with others. The
# installed version is removed only when the new one is built: prologs, and new processes of jobs with limits, need it.
install: install-packages ## Sluice into PREFIX (/opt/sluice); starts nothing
	$(PYTHON3) -m venv $(PREFIX)
	$(PREFIX)/bin/pip install -q --require-hashes -r tools/build.lock
	$(PREFIX)/bin/pip install -q --require-hashes --no-build-isolation -r tools/install.lock
	rm -rf build/install
	$(PREFIX)/bin/pip wheel -q --no-index --no-deps --no-build-isolation --wheel-dir build/install .
	$(PREFIX)/bin/pip uninstall -q -y sluice # the name until 0.1.0
	$(PREFIX)/bin/pip install -q --no-index --no-deps --no-build-isolation --force-reinstall build/install/*.whl
	@echo "installed: $(PREFIX)/bin/sluice"

# The same commit gives the same bytes everywhere.
VERSION := $(shell sed -n 's/^#define SLUICE_VERSION "\(.*\)"/\1/p' $(VERSION_HEADER))
dist: ## the release's archive and its SHA-256, in dist/
	mkdir -p dist
	git archive --format=tar --prefix=sluice-$(VERSION)/ HEAD | gzip -9n >dist/sluice-$(VERSION).tar.gz
	cd dist && sha256sum sluice-$(VERSION).tar.gz | tee SHA256SUMS

deb: ## Debian packages of HEAD for this Debian and its Slurm, in dist/
	tools/install-packages build plugins deb
	tools/deb

clean: ## remove what was built, and .venv
	rm -rf build build-* dist $(VENV) sluice/core/*.so sluice/core/sluice-guard sluice/core/sluice-launch sluice/core/sluice-ucx gpu_sim/lib dev_cluster/cgroup_view/*.so dev_cluster/own_address/*.so dev_cluster/nodelay/*.so dev_cluster/enter/enter
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
