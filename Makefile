# Every target creates what it needs: a virtual environment in .venv, with pinned versions (requirements/). Those that
# run in a GPU machine's own Python (PYTHON=...: test-gpu, install, bench, bench-full) take its torch and pytest as they are.
# A CPU-only machine elsewhere: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets the small build of torch.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=

BIN   := $(VENV)/bin
TRL_VENV := $(VENV)-trl
VERL_VENV := $(VENV)-verl
OPENRLHF_VENV := $(VENV)-openrlhf
PIP   := bin/python -m pip install --quiet --disable-pip-version-check
GPU   = $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr 'A-Z ' 'a-z_')
NEEDS_GPU = @nvidia-smi > /dev/null 2>&1 || { echo "make $@ needs an NVIDIA GPU"; exit 1; }
LOCAL_TESTS := not gpu and not multi_gpu and not slow

.DEFAULT_GOAL := help
.PHONY: help demo test test-trl test-verl test-openrlhf test-gpu install wheel kernels bench bench-full report lint clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 15

demo: $(VENV)/demo.stamp  ## one GRPO update of a real model, replicated and shared: equal, and how many times as fast
	$(BIN)/python examples/policy_update.py $(ARGS)

test: $(VENV)/test.stamp  ## the CPU tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "$(LOCAL_TESTS)" $(ARGS)

test-trl: $(TRL_VENV)/trl.stamp  ## the tests of the TRL trainers, in an environment of their own
	$(TRL_VENV)/bin/python -m pytest tests/trl -m "$(LOCAL_TESTS)" $(ARGS)

test-verl: $(VERL_VENV)/verl.stamp  ## the tests of the veRL plug-in, in an environment of their own
	$(VERL_VENV)/bin/python -m pytest tests/verl -n 2 --dist loadfile -m "$(LOCAL_TESTS)" $(ARGS)

test-openrlhf: $(OPENRLHF_VENV)/openrlhf.stamp  ## the tests of the OpenRLHF launcher, in an environment of their own (Python 3.11)
	$(OPENRLHF_VENV)/bin/python -m pytest tests/openrlhf -m "$(LOCAL_TESTS)" $(ARGS)

test-gpu:  ## the GPU tests, both code paths and the composed backend, in the Python that runs; writes benchmarks/results/<gpu>/tests*.json
	$(NEEDS_GPU)
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) tests/gpu/run_isolated.py --out benchmarks/results/$(GPU)/tests.json $(ARGS)
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu $(wildcard tests/test_*.py) --ignore-glob "tests/gpu/test_*" -m "gpu or multi_gpu" --gpu-report benchmarks/results/$(GPU)/tests_composed.json
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu/test_gpu_sharded.py

install:  ## install into the Python that runs (CUDA library where a GPU is visible or FLASH_ATTN_CUDA_ARCHS is set)
	$(PYTHON) -m pip install "setuptools>=77" wheel ninja
	$(PYTHON) -m pip install --no-deps nvidia-cutlass==4.2.0
	$(PYTHON) -m pip install --no-build-isolation . $(ARGS)
	@cd / && $(PYTHON) -c "import flash_attn as f; print('flash_attn', f.__version__, '- compiled kernels:', f.why_unavailable() or 'available')"

wheel: $(VENV)/dev.stamp  ## build dist/*.whl (CUDA library as for install)
	$(BIN)/python -m build --wheel --no-isolation $(ARGS)

kernels: $(VENV)/dev.stamp  ## compile one kernel per arch and pass, read the compiler's report and the machine code (nvcc, no GPU); interpret and compile the Triton kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_decode.py tests/test_cross_entropy.py tests/test_triton.py
	$(BIN)/python tests/compile_decode.py
	$(BIN)/python csrc/flash_attn/kernels.py --archs "80;90" --gpus "80;90" --head-dims 64 --dtypes bf16 --strict --out build/check
	$(BIN)/python tests/check_library.py build/check/_C.so

bench:  ## time the kernels against their peers, in the Python that runs (about 8 minutes); writes benchmarks/results/<gpu>/kernels.json
	$(NEEDS_GPU)
	$(PYTHON) benchmarks/run.py --cases quick,main,small,long,plain,ragged,head_dims --repeats 7 --out benchmarks/results/$(GPU)/kernels.json $(ARGS)

bench-full:  ## everything else about attention and a layer, case by case; what is measured already is left out
	$(NEEDS_GPU)
	$(PYTHON) benchmarks/run.py --cases paper,groups --repeats 3 --resume --out benchmarks/results/$(GPU)/kernels_full.json $(ARGS)
	$(PYTHON) benchmarks/run.py --cases paper_head_dims --repeats 3 --providers 'ours-*,*-two-call,fa4-*' --resume --out benchmarks/results/$(GPU)/kernels_head_dims.json $(ARGS)
	$(PYTHON) benchmarks/run.py --cases gemma4 --repeats 5 --providers 'ours-*' --resume --out benchmarks/results/$(GPU)/gemma4_layers.json $(ARGS)
	$(PYTHON) benchmarks/error_growth.py --out benchmarks/results/$(GPU)/error_growth.json
	$(PYTHON) benchmarks/break_even.py --resume --out benchmarks/results/$(GPU)/break_even.json
	$(PYTHON) benchmarks/decoder_layer.py --resume --out benchmarks/results/$(GPU)/decoder_layer.json

report: $(VENV)/demo.stamp  ## fill the README's measured blocks from benchmarks/results
	$(BIN)/python benchmarks/report.py $(ARGS)

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## remove what the other targets made, the environment too
	rm -rf "$(VENV)" "$(TRL_VENV)" "$(VERL_VENV)" "$(OPENRLHF_VENV)" build dist out flash_attn/_C.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by version, so that no resolver picks a newer one of several gigabytes; then this package without
# CUDA and without isolation, so that it sees that torch.
%/base.stamp: pyproject.toml setup.py requirements/pins.txt
	@echo "Creating $* with $(TORCH) (a few minutes, once)"
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/$(PIP) "$(TORCH)" "setuptools>=77" wheel
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $*/$(PIP) -c requirements/pins.txt --no-build-isolation -e .
	@touch $@

.PRECIOUS: %/base.stamp

$(TRL_VENV)/trl.stamp: $(TRL_VENV)/base.stamp requirements/tasks.txt requirements/demo-no-deps.txt
	$(TRL_VENV)/$(PIP) -c requirements/pins.txt trl peft datasets accelerate pytest gguf matplotlib tqdm -r requirements/tasks.txt
	$(TRL_VENV)/$(PIP) --no-deps -r requirements/demo-no-deps.txt
	@touch $@

$(VERL_VENV)/verl.stamp: $(VERL_VENV)/base.stamp requirements/verl.txt requirements/verl-no-deps.txt
	$(VERL_VENV)/$(PIP) -r requirements/verl.txt
	$(VERL_VENV)/$(PIP) --no-deps -r requirements/verl-no-deps.txt
	@touch $@

$(OPENRLHF_VENV)/openrlhf.stamp: $(OPENRLHF_VENV)/base.stamp requirements/openrlhf.txt requirements/openrlhf-no-deps.txt
	$(OPENRLHF_VENV)/$(PIP) -r requirements/openrlhf.txt
	DS_BUILD_OPS=0 $(OPENRLHF_VENV)/$(PIP) --no-deps --no-build-isolation -r requirements/openrlhf-no-deps.txt
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp requirements/tasks.txt requirements/demo-no-deps.txt
	$(VENV)/$(PIP) -c requirements/pins.txt transformers gguf accelerate matplotlib tqdm psutil -r requirements/tasks.txt
	$(VENV)/$(PIP) --no-deps -r requirements/demo-no-deps.txt
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(VENV)/$(PIP) -c requirements/pins.txt pytest pytest-xdist peft
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(VENV)/$(PIP) -c requirements/pins.txt ruff mypy build ninja triton nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(VENV)/$(PIP) --no-deps -c requirements/pins.txt nvidia-cutlass
	@touch $@
