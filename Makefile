# make demo and make test need only Python 3.11 or later: they make .venv and install into it once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
WORKERS ?= 2

# Models are built from configs with random weights; nothing is fetched while anything runs.
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-wide test-machine test-other-blas test-all lint docs corpus corpus-packages runtimes wheel-test fuzz bench bench-quick gpu clean

demo: $(INSTALLED)
	$(BIN)/python -m examples.make_checkpoint out/bert
	$(BIN)/attngraph optimize out/bert -o out/onnx
	$(BIN)/attngraph bench out/onnx/model.onnx out/bert --engine eager --engine attngraph

# One thread per worker; a file's tests stay on one worker, where they share what they compiled.
# Files are dealt in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder
test test-wide test-machine test-other-blas test-all: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(PYTEST) -m 'not slow and not machine and not wide'

# The same claims over more architectures, lengths and spellings.
test-wide: $(INSTALLED)
	$(PYTEST) -m 'wide and not slow and not machine'

# What no change to a pass can break: onnxruntime's kernels, hostile files, clocks, memory.
test-machine: $(INSTALLED)
	$(PYTEST) -m 'machine and not slow'

test-all: $(INSTALLED)
	$(PYTEST)

# Stands for the CPU that is not at hand: tests/products.py.
test-other-blas: $(INSTALLED)
	$(PYTEST) -m 'not slow and not machine and not wide' --other-blas tests/capture tests/passes

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Some models of transformers go through a set of names: their files depend on its order.
corpus: export PYTHONHASHSEED := 0
corpus: $(INSTALLED)
	$(BIN)/python -m tests.corpus.sweep

# Other people's packages, in a folder of their own: their pins are not ours.
PACKAGES := .packages
corpus-packages: $(INSTALLED)
	$(BIN)/python -m pip install -q --no-deps --target $(PACKAGES) \
		-r tests/corpus/packages/requirements.txt
	PYTHONPATH=$(PACKAGES) $(BIN)/python -W ignore -m tests.corpus.packages $(ROWS)

# Other people's runtimes, beside ours. RECORD=1 writes what passed, for docs/runtimes.md.
RUNTIMES := .runtimes
JAVASCRIPT := $(RUNTIMES)/javascript
ORTS := 1.24.1 1.27.0 1.32.0
runtimes: export OMP_NUM_THREADS := 1
runtimes: $(INSTALLED)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(RUNTIMES) \
		-r tests/runtimes/requirements.txt
	for version in $(ORTS); do $(BIN)/python -m pip install -q --no-deps --upgrade \
		--target $(RUNTIMES)/onnxruntime-$$version onnxruntime==$$version; done
	$(BIN)/python -m pip install -q --upgrade --target $(RUNTIMES)/ray -r tests/runtimes/ray.txt
	$(PYTHON) -m venv $(RUNTIMES)/with-optimum
	$(RUNTIMES)/with-optimum/bin/python -m pip install -q -r tests/runtimes/optimum.txt
	$(MAKE) $(JAVASCRIPT)/.installed || \
		echo 'npm could not install them: the runtimes of JavaScript are left out' >&2
	PYTHONPATH=$(RUNTIMES) $(PYTEST) tests/runtimes

# No package's own scripts are run: they fetch what the tests don't need.
$(JAVASCRIPT)/.installed: $(wildcard tests/runtimes/javascript/*.json)
	mkdir -p $(@D) && cp $^ $(@D)
	cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# The wheel in an environment of its own, with our packages behind it: nothing is fetched.
wheel-test: $(INSTALLED)
	$(BIN)/python -m tests.wheel out/wheel

# FUZZ="--draws 1000 --first 5000" asks for others; python -m tests.fuzz SEED replays one.
fuzz: export OMP_NUM_THREADS := 1
fuzz: $(INSTALLED)
	$(BIN)/python -W ignore -m tests.fuzz --jobs $(WORKERS) $(FUZZ)

# Whether the ratios that matter are above their bars: five minutes, on a quiet machine.
bench-quick: $(INSTALLED)
	$(BIN)/python -W ignore -m bench.quick

bench: $(INSTALLED)
	$(BIN)/python -m bench.speed $(BENCH)
	$(BIN)/python -W ignore -m bench.decode
	$(BIN)/python -W ignore -m bench.bounds
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.weight_only --keep
	$(BIN)/python -W ignore -m bench.quantized
	$(BIN)/python -W ignore -m bench.quantized_decoding
	$(BIN)/python -m bench.node_count
	$(BIN)/python -m bench.compile_time
	$(BIN)/python -m bench.static_sizes
	$(BIN)/python -W ignore -m bench.zoo
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.checkpoint --rounds 3
	$(BIN)/python -W ignore -m bench.start
	$(BIN)/python -m bench.page

# With a BIN of its own nothing is installed: make gpu BIN=/usr/bin.
OUT ?= out/gpu
gpu: $(if $(filter .venv/bin,$(BIN)),$(INSTALLED))
	$(BIN)/python -m tests.gpu.run $(OUT) $(GPU)

docs: $(INSTALLED)
	$(BIN)/python -m docs.generate

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'attngraph needs Python 3.11 or later: make PYTHON=python3.11 …' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
