# make demo | test | docs | bench | lint | venv: each sets up what it needs and runs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs bench lint venv clean

demo: venv
	$(BIN)/hamu demo --overwrite

# A file stays with one process, for its fixtures. In the order of their names the long ones come first.
test: venv
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder --durations=25

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site is in build/docs; its search needs a server: python -m http.server --directory build/docs"

bench: venv
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: .venv/.complete

# torch first: the constraints pin it, and nothing later may pull another build of it.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build
