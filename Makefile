# Every target first makes .venv if need be: no other set-up. `make` alone lists the targets.
PYTHON := $(or $(PYTHON),$(shell command -v python3 2>/dev/null),python3)
NP ?= 2
ARGS ?=
# Each worker takes the next test; two at a time start jobs of ranks, which often wait: see
# tests/conftest.py.
JOBS := -n 4 --dist loadgroup
QUICK := (not (parallel or slow) or smoke) and not more
CORE := not (torch or tf or parallel or mpi or gpu or slow or more)
# Would load a framework, or build the emulator, only to be left out then.
NOT_CORE := gpu parallel test_fakes.py test_flops.py test_learners.py test_peers.py

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TF_CPP_MIN_LOG_LEVEL ?= 2
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: help install install-ddp demo demo-tf demo-ddp cluster cluster-netns test test-all test-core test-parallel test-integrations test-stalls test-gpu horovod-cuda lint format recipe docs dist coverage size clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

install: ## make .venv with Horovod, PyTorch, TensorFlow (first time: minutes; then: nothing)
	@$(PYTHON) scripts/bootstrap.py

install-ddp: ## make .venv for demo-ddp alone, without Horovod and TensorFlow, if there is none
	@$(PYTHON) scripts/bootstrap.py --without-horovod

demo: install ## train on the digits with NP=2 processes; ARGS="..." goes to the example
	horovodrun -np $(NP) python examples/torch_digits.py $(ARGS)

demo-tf: install ## the same with Keras; ARGS="..." goes to the example
	horovodrun -np $(NP) python examples/keras_digits.py $(ARGS)

demo-ddp: install-ddp ## the same with DDP under torchrun, without Horovod; ARGS="..." goes to the example
	torchrun --standalone --nproc-per-node $(NP) examples/ddp_digits.py $(ARGS)

cluster: ## train on four containers with RATE=1gbit links (Docker); ARGS="..." goes to the example
	docker/run python examples/torch_digits.py --out /tmp/out $(ARGS)

cluster-netns: install ## the same in network namespaces, without Docker; as root
	docker/netns -r $(or $(RATE),1gbit) python examples/torch_digits.py $(ARGS)

test: install ## run most tests, in minutes; ARGS="..." goes to pytest
	pytest -m "$(QUICK)" $(JOBS) $(ARGS)

test-all: install ## run all tests that this machine can run
	pytest $(JOBS) $(ARGS)

test-core: install ## run the tests that need no framework, no MPI and no emulated GPU
	pytest $(addprefix --ignore tests/,$(NOT_CORE)) -m "$(CORE)" -n auto --maxprocesses 4 $(ARGS)

test-parallel: install ## run the tests that start several processes
	pytest -m parallel $(JOBS) $(ARGS)

# Has the packages of .venv, too, by a line in its site-packages.
.venv-integrations/done: scripts/integrations.txt | install
	python -m venv --clear .venv-integrations
	python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv-integrations/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	.venv-integrations/bin/pip install -r scripts/integrations.txt
	touch $@

test-integrations: .venv-integrations/done ## run scripts of Hugging Face, Accelerate and Lightning
	.venv-integrations/bin/python -m pytest tests/test_integrations.py $(ARGS)

test-stalls: install ## run jobs whose first rank stalls, 20 times each: half an hour
	python -m tests.test_stalls

test-gpu: ## run the tests that need an NVIDIA GPU; PYTHON: one that has CuPy and PyTorch, gets the rest
	@$(PYTHON) -c "import hypothesis, matplotlib, ml_dtypes, numba, pytest, rich, scipy, xdist" || \
		$(PYTHON) -m pip install -e '.[dev]'
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest -m gpu -n auto --maxprocesses 8 --dist loadgroup \
		tests/gpu tests/test_parallel.py tests/test_torch_distributed.py $(ARGS)

horovod-cuda: ## build Horovod for the CUDA PyTorch of PYTHON, and install it there; ARGS="--help"
	$(PYTHON) scripts/horovod_cuda.py $(ARGS)

lint: install ## check style, format, types and the line budget
	ruff check && ruff format --check && mypy && python scripts/size.py

format: install ## format the code and mend what the linter can
	ruff check --fix && ruff format

recipe: install ## write what follows from the table of recipes: stub, golden files, tables of the docs
	python -m tests.make_recipe

docs: install ## build the documentation as a site, out/site/index.html
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

dist: install ## build the source distribution and its wheel in dist/, and check them
	rm -rf dist
	python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	python -m twine check --strict dist/*

coverage: install ## measure which lines the tests of make test-core run
	rm -rf out/coverage
	python -m coverage run -m pytest $(addprefix --ignore tests/,$(NOT_CORE)) -m "$(CORE)" -n auto --maxprocesses 4 $(ARGS)
	python -m coverage combine --quiet && python -m coverage report

size: install ## check the line budget
	python scripts/size.py

clean: ## remove .venv, caches and outputs; keep the built Horovod in the user's cache
	rm -rf .venv .venv-integrations build dist out *.egg-info .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
