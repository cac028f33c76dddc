# Thin: every target is one or two commands. `make demo` and `make test` install what they need (Debian 12 or 13, root).
VENV := .venv
PYTHON := $(VENV)/bin/python
PREFIX ?= /opt/sluice
PYTHON3 ?= $(firstword $(wildcard /usr/bin/python3) python3)
export CMAKE_GENERATOR := Ninja

.PHONY: help demo test test-trixie check bench soak install dist build native-test fuzz docs format clean

help:
	@echo "make demo | test | check | bench | soak | install | dist | clean   (see README.md)"

# ---- what is needed ----
$(VENV)/.installed: pyproject.toml tools/debian-packages.txt
	tools/install-packages build
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(VENV)/bin/pip install -q scikit-build-core "cffi>=1.16" setuptools
	$(VENV)/bin/pip install -q --no-build-isolation -e ".[dev]"
	touch $@

build: $(VENV)/.installed
	cmake -S . -B build/editable -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE=$(CURDIR)/$(PYTHON) >/dev/null
	cmake --build build/editable

.PHONY: install-packages cluster-packages test-packages
install-packages:
	tools/install-packages build plugins
cluster-packages:
	tools/install-packages build cluster
test-packages:
	tools/install-packages build cluster test

# ---- what it is for ----
demo: cluster-packages build
	$(PYTHON) -m dev_cluster.demo

# Two modules at a time: much of the time goes into waiting for daemons.
test: test-packages build native-test
	tools/run-tests $(PYTHON)

test-trixie: test-packages build
	SLUICE_TRIXIE=require $(PYTHON) -m pytest tests -m trixie

check: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	tools/clang-format --check
	$(PYTHON) tools/api_reference.py --check
	$(PYTHON) tools/policy_reference.py --check
	$(PYTHON) tools/metrics_reference.py --check
	$(PYTHON) tools/report_fields.py --check

native-test: build
	tools/native-test

fuzz: build
	tools/fuzz

# TRACES=DIR: the folder of public traces that docs/benchmarks.md describes; without it only what needs none.
# NAMES="probe group": only these. All of it takes about four hours.
bench: cluster-packages build
	tools/bench "$(TRACES)" $(NAMES)

soak: test-packages build
	SLUICE_TEST_SCALE=full tools/native-test
	SLUICE_TEST_SCALE=full $(PYTHON) -m pytest tests --timeout 7200

# The page that is written from the sources.
docs: build
	$(PYTHON) tools/api_reference.py
	$(PYTHON) tools/policy_reference.py
	$(PYTHON) tools/metrics_reference.py
	$(PYTHON) tools/report_fields.py

format: build
	$(VENV)/bin/ruff check --fix-only -q .
	$(VENV)/bin/ruff format -q .
	tools/clang-format

# As root: pip takes no file whose hash is not in the lock files (tools/lock), and no package builds with others.
install: install-packages
	$(PYTHON3) -m venv $(PREFIX)
	$(PREFIX)/bin/pip install -q --require-hashes -r tools/build.lock
	$(PREFIX)/bin/pip install -q --require-hashes --no-build-isolation -r tools/install.lock
	$(PREFIX)/bin/pip install -q --no-index --no-deps --no-build-isolation --force-reinstall .
	@echo "installed: $(PREFIX)/bin/sluice"

# The release's archive and its SHA-256: of one commit the same bytes everywhere.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
dist:
	mkdir -p dist
	git archive --format=tar --prefix=sluice-$(VERSION)/ HEAD | gzip -9n >dist/sluice-$(VERSION).tar.gz
	cd dist && sha256sum sluice-$(VERSION).tar.gz | tee SHA256SUMS

clean:
	rm -rf build build-* dist $(VENV) native/sluice_core/*.so native/sluice_core/sluice-guard dev_cluster/gpu_sim/lib dev_cluster/cgroup_view/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
