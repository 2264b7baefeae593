# One task runner. Every target sets up .venv by itself; nothing is installed outside it.
# ARGS is handed on:  make test ARGS="tests/fedcore -x"    make demo ARGS="--rounds 5"

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
DEMO := .venv/.demo
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := --no-deps --require-hashes --requirement

# Tests start hundreds of processes: what one of them compiles, the others load, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

JS := device_runtime/js
ANDROID := device_runtime/android
JVM := $(ANDROID)/jvm/target
NODE_IS_NEW := node $(JS)/node-is-new.cjs 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all js android apk page docs check format migration notebooks lock sbom clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED) ## make .venv and install Muster with everything that development needs

demo: $(DEMO) ## train on handwritten digits: a real coordinator, emulated devices, a table of results
	$(BIN)/muster demo $(ARGS)

test: $(INSTALLED) ## run the tests, without those that take long
	@$(if $(ARGS),,if $(NODE_IS_NEW); then $(MAKE) --no-print-directory js; else echo 'skipped: make js, which needs Node 22.18 or newer'; fi)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal $(EVERY) $(ARGS)

test-all: EVERY := -m ''
test-all: test ## run all tests, the ones marked `long` too

js: $(JS)/node_modules/.package-lock.json ## check and test the device runtime in TypeScript, with Node 22.18 or newer
	cd $(JS) && npm run --silent check && npm test --silent

android: $(INSTALLED) ## build and test the device runtime in Kotlin, with Java 17, Maven and Debian's aapt
	@$(ANDROID)/needs java mvn aapt
	mvn -q -f $(ANDROID) package
	@-java -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit=$(JVM)/muster-device.jsa -jar $(JVM)/muster-device.jar run --once \
		--coordinator http://127.0.0.1:9 --population none --examples simulator/datasets/digits.npz --state $(JVM)/state >/dev/null
	$(BIN)/python -m tests.conformance --device jvm

apk: android ## make a signed debug APK of the sample app, with Debian's aapt, zipalign and apksigner too
	@$(ANDROID)/needs zipalign apksigner keytool unzip
	$(ANDROID)/app/package

page: $(JS)/node_modules/.package-lock.json ## build the web page by which browsers take part, in device_runtime/js/dist/page
	cd $(JS) && npm run --silent page

docs: $(INSTALLED) ## build the site of the documents, with what the code says: site/index.html
	$(BIN)/sphinx-build -q -W --keep-going -j auto -c docs -b html . site

check: $(INSTALLED) ## formatting, lint, types, and which package may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## rewrite the sources in the one format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

migration: $(INSTALLED) ## show what a new revision of the database must do
	$(BIN)/python -m tools.make_migration

notebooks: $(INSTALLED) ## run the notebooks in examples/ anew, and keep their outputs
	$(BIN)/python -m tools.make_notebooks

lock: $(INSTALLED) ## write requirements/*.lock anew: the newest versions that pyproject.toml allows, with digests
	$(PIP) uv
	$(BIN)/python requirements/lock.py

sbom: $(INSTALLED) ## write sbom.json: the packages in .venv, their versions and licences, in CycloneDX
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-file sbom.json

clean: ## remove .venv, caches and outputs
	rm -rf .venv site $(JS)/node_modules $(JS)/dist sbom.json build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Muster needs Python 3.11 or newer; name one with PYTHON=...")'
	$(PYTHON) -m venv .venv

# A stamp is newer than pyproject.toml exactly when what that file asks for has been installed: what the lock file has by
# digest, and then the rest, which is torch.
# Without --no-compile, pip compiles thousands of modules that the demo never loads, which doubles the time.
$(DEMO): pyproject.toml requirements/sim.lock | $(BIN)/pip
	@echo 'installing what the demo needs: a minute when pip has it in its cache'
	$(PIP) --no-compile $(LOCKED) requirements/sim.lock
	$(PIP) --no-compile --no-build-isolation -e '.[sim]'
	@touch $@

$(INSTALLED): pyproject.toml requirements/dev.lock | $(BIN)/pip
	$(PIP) $(LOCKED) requirements/dev.lock
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(DEMO) $@

# npm writes this file when an installation is whole.
$(JS)/node_modules/.package-lock.json: $(JS)/package-lock.json
	@$(NODE_IS_NEW) || { echo 'The device runtime in TypeScript needs Node 22.18 or newer: npm install --prefix .venv/node node@24, and put .venv/node/node_modules/.bin on PATH' >&2; exit 1; }
	cd $(JS) && npm ci --silent --no-audit --no-fund
	@touch $@
