# Two commands: `make run` sets up and runs a whole mesh here, `make test` sets up and runs the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
CHAOS_SECONDS ?= 60
SOAK_SECONDS ?= 3600
SOURCES := pyproject.toml requirements.lock hatch_build.py $(wildcard src/meshnet/protocol/*.proto) \
	$(shell find web -type f -not -path '*/node_modules/*' 2>/dev/null)

.PHONY: setup run test test-full fmt lint types bench chaos soak screenshots lock clean

setup: $(STAMP)

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "meshnet needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(STAMP)

run: setup
	$(BIN)/meshnet demo

test: setup
	$(BIN)/python -m pytest -m "not full" -n 2 --dist loadfile || { \
		[ $$? -eq 1 ] || exit 1; \
		echo "== What failed is run once more, alone. What passes now has a race: mend it."; \
		$(BIN)/python -m pytest -m "not full" --last-failed --last-failed-no-failures none; }

test-full: setup
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/run.py

screenshots: setup
	$(BIN)/python benchmarks/screenshots.py

chaos: setup
	cd tests && ../$(BIN)/python -m chaos --seconds $(CHAOS_SECONDS) $(if $(SEED),--seed $(SEED))

soak: setup
	cd tests && ../$(BIN)/python -m chaos --calm --seconds $(SOAK_SECONDS) $(if $(SEED),--seed $(SEED))

lock:
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra postgres --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-annotate --quiet -o requirements.lock

clean:
	rm -rf .venv dist build web/node_modules src/meshnet/web/dist
