# make demo | test | test-lowest | test-wheel | docs | bench | lint | venv: each sets up what it needs and runs.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is written where it is first imported, which takes less time than compiling all that is installed.
export PYTHONDONTWRITEBYTECODE :=
QUICK := --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-lowest test-wheel docs bench lint venv clean

# The core and whole runs, for other versions.
LOWEST := $(addprefix tests/,parity properties unit/test_pair_*.py unit/test_guard.py \
	unit/test_objectives.py unit/test_models.py unit/test_language_models.py unit/test_files.py \
	unit/test_run_folder.py integration/test_trainer.py integration/test_demo.py)

demo: venv
	$(BIN)/hamu demo --overwrite

# A file stays with one process, for its fixtures. In the order of their names the long ones come first.
test: venv
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder --durations=25

# With the lowest version of everything that pyproject.toml allows (torch comes from PyPI with its CUDA, 3 GB).
test-lowest: build/lowest/.complete
	build/lowest/bin/python -m pytest --numprocesses 2 --dist loadscope $(LOWEST)

build/lowest/.complete: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/python -m pip install $(QUICK) --no-cache-dir --constraint constraints-lowest.txt --editable . pytest hypothesis pytest-xdist
	@touch $@

# The wheel alone, in an environment without the tools of development.
test-wheel:
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install $(QUICK) --constraint constraints.txt torch
	build/wheel/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build .
	build/wheel/bin/python -m pip install $(QUICK) --constraint constraints.txt build/hamu-*.whl
	cd build && wheel/bin/hamu demo --output_dir wheel/demo

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
	$(BIN)/python -m pip install $(QUICK) --constraint constraints.txt torch
	$(BIN)/python -m pip install $(QUICK) --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build
